"""Nested tensors to and from one safetensors file, written so that a crash leaves the old file or the new one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import RunError
from ..files import replacing
from ..params import Params


def save_tensors(path: Path, tree: Mapping[str, Any], meta: Mapping[str, str]) -> None:
    """Write a nest of dicts of tensors and some text to `path`, atomically and durably."""
    # Rows of an expanded tensor share memory, which the format has no word for.
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in _flatten(tree).items()}
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


def restore(template: Any, flat: Mapping[str, Tensor], path: str = "") -> Any:
    """A nest like `template` with the tensors of `flat`.

    Raises:
        RunError: a tensor is missing or of another shape.

    """
    if isinstance(template, Tensor):
        found = flat.get(path)
        if found is None or found.shape != template.shape:
            got = "nothing" if found is None else f"shape {tuple(found.shape)}"
            raise RunError(
                f"the checkpoint does not fit: expected {path} of {tuple(template.shape)}, got {got}"
            )
        return found.to(template)
    items = {k: restore(v, flat, f"{path}/{k}" if path else k) for k, v in template.items()}
    return Params(items) if isinstance(template, Params) else items


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        flat |= {name: value} if isinstance(value, Tensor) else _flatten(value, name)
    return flat
