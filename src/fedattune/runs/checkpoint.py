"""Nested tensors to and from one safetensors file, written so that a crash leaves the old file or the new one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import RunError
from ..files import replacing
from ..params import Params
from .rows import DiskRows, rows_file

SLOTS = "@slots"
"""What a checkpoint calls the slots of a stack on disk."""


def save_tensors(path: Path, tree: Mapping[str, Any], meta: Mapping[str, str]) -> None:
    """Write a nest of dicts of tensors and some text to `path`, atomically and durably."""
    write_flat(path, flattened(tree), meta)


def flattened(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies in memory of all tensors of a nest, and where the rows of its stacks on disk are, by path."""
    # Rows of an expanded tensor share memory, which the format has no word for.
    return {
        k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in _flatten(tree).items()
    }


def write_flat(path: Path, flat: dict[str, Tensor], meta: Mapping[str, str]) -> None:
    """Write what `flattened` gave."""
    with replacing(path) as new:
        save_file(flat, new, dict(meta))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the text of a file that `save_tensors` wrote.

    Raises:
        RunError: the file is missing or damaged.

    """
    try:
        with safe_open(path, "pt") as file:
            return {k: file.get_tensor(k) for k in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def restore(
    template: Any,
    flat: Mapping[str, Tensor],
    path: str = "",
    rows: Path | None = None,
    older: Sequence[Mapping[str, Tensor]] = (),
) -> Any:
    """A nest like `template` with the tensors of `flat`; `rows` is the folder of stacks on disk.

    A stack that was in memory goes to disk where that of the template is there, and the reverse. `older` are the
    checkpoints before that are kept, the last one first: their rows on disk stay until as many have followed.

    Raises:
        RunError: a tensor is missing or of another shape.

    """
    name = f"{path}/{SLOTS}"
    slots = flat.get(name)
    if isinstance(template, DiskRows):
        before = [one[name] for one in older if name in one]
        return (
            template.restore(slots, before) if slots is not None else _to_disk(template, flat, path, before)
        )
    if slots is not None and rows and isinstance(template, Params):
        row = template.rows(0)
        kept = DiskRows(row, len(slots), rows_file(rows, path)).restore(slots)
        return _to_memory(kept, template)
    if isinstance(template, Tensor):
        found = flat.get(path)
        if found is None or found.shape != template.shape:
            got = "nothing" if found is None else f"shape {tuple(found.shape)}"
            raise RunError(
                f"the checkpoint does not fit: expected {path} of {tuple(template.shape)}, got {got}"
            )
        # In a file tensors begin anywhere, and the last bit of a product may depend on where its factors begin.
        return found.to(template, copy=True)
    items = {k: restore(v, flat, f"{path}/{k}" if path else k, rows, older) for k, v in template.items()}
    return Params(items) if isinstance(template, Params) else items


def _to_disk(stack: DiskRows, flat: Mapping[str, Tensor], path: str, older: Sequence[Tensor]) -> DiskRows:
    """The stack with the rows that a checkpoint holds; those that older ones left in its file stay."""
    found = Params({k: flat[f"{path}/{k}"] for k in stack if f"{path}/{k}" in flat})
    if len(found) < len(stack) or any(len(v) != stack.n for v in found.values()):
        raise RunError(f"the checkpoint does not fit: expected {path} of {stack.n} clients")
    stack.restore(torch.full((stack.n,), -1, dtype=torch.int32), older)
    for ids in stack.stretches(torch.arange(stack.n)):
        stack.put_rows(ids, found.rows(ids))
    return stack


def _to_memory(kept: DiskRows, stack: Params) -> Params:
    """The stack with the rows that are on disk."""
    device = next(iter(stack.values())).device
    for ids in kept.stretches((kept.slots >= 0).nonzero().flatten()):
        stack.put_rows(ids.to(device), kept.rows(ids))
    return stack


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        if isinstance(value, DiskRows):
            flat[f"{name}/{SLOTS}"] = value.slots
        else:
            flat |= {name: value} if isinstance(value, Tensor) else _flatten(value, name)
    return flat


def unfinished(folder: Path) -> list[Path]:
    """What processes that were killed began to write in a folder (see `replacing`)."""
    return sorted(folder.glob(".*.tmp*"))


def disk_rows(tree: Any) -> list[DiskRows]:
    """All stacks on disk in a nest of dicts."""
    if isinstance(tree, DiskRows):
        return [tree]
    return [found for v in tree.values() for found in disk_rows(v)] if isinstance(tree, Mapping) else []
