"""Save and restore the state of a run.

Each checkpoint is one file. It is written completely or not at all, and its checksum is tested when it is read.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import RunError
from ..core.io import copy_tensors, flatten_tree, load_tensors, save_tensors, unfinished_files
from ..core.params import Params
from .rows import KEPT_CHECKPOINTS, DiskRows, make_rows_path

SLOTS_KEY = "@slots"
"""Name of the slots of a stack on disk, in a checkpoint."""


def restore_tree(
    template: Any,
    flat: Mapping[str, Tensor],
    path: str = "",
    rows: Path | None = None,
    older: Sequence[Mapping[str, Tensor]] = (),
) -> Any:
    """Restore nested tensors, shaped like `template`, from a checkpoint.

    Stacks go where the template has them, to disk or to memory, independent of the checkpoint. The rows on disk of
    `older` checkpoints, the latest first, stay until as many checkpoints have followed.
    """
    name = f"{path}/{SLOTS_KEY}"
    slots = flat.get(name)
    if isinstance(template, DiskRows):
        before = [checkpoint[name] for checkpoint in older if name in checkpoint]
        return template.restore(slots, before) if slots is not None else _to_disk(template, flat, path, before)
    if slots is not None and rows and isinstance(template, Params):
        row = template.rows(0)
        stored = DiskRows(row, len(slots), make_rows_path(rows, path)).restore(slots)
        return _to_memory(stored, template)
    if isinstance(template, Tensor):
        tensor = flat.get(path)
        if tensor is None or tensor.shape != template.shape:
            content = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise RunError(f"the checkpoint does not fit: expected {path} of {tuple(template.shape)}, got {content}")
        # Copy to aligned memory: the last bit of a product may depend on the alignment of its factors.
        return tensor.to(template, copy=True)
    items = {k: restore_tree(v, flat, f"{path}/{k}" if path else k, rows, older) for k, v in template.items()}
    return Params(items) if isinstance(template, Params) else items


def _to_disk(stack: DiskRows, flat: Mapping[str, Tensor], path: str, older: Sequence[Tensor]) -> DiskRows:
    """Write the rows of a checkpoint to a stack on disk; rows of older checkpoints stay in its file."""
    saved = Params({k: flat[f"{path}/{k}"] for k in stack if f"{path}/{k}" in flat})
    if len(saved) < len(stack) or any(len(v) != stack.n for v in saved.values()):
        raise RunError(f"the checkpoint does not fit: expected {path} of {stack.n} clients; start a new run")
    stack.restore(torch.full((stack.n,), -1, dtype=torch.int32), older)
    for ids in stack.split_clients(torch.arange(stack.n)):
        stack.put_rows(ids, saved.rows(ids))
    return stack


def _to_memory(stored: DiskRows, stack: Params) -> Params:
    """Read the written rows of a stack on disk into a stack in memory."""
    device = next(iter(stack.values())).device
    for ids in stored.split_clients((stored.slots >= 0).nonzero().flatten()):
        stack.put_rows(ids.to(device), stored.rows(ids))
    return stack


CHECKPOINT_FORMAT = 1
"""Version of the content. All versions share the checksum, so a newer checkpoint is never taken for a damaged one."""


class DamagedCheckpointError(RunError):
    """A checkpoint that differs from the file that was written."""


class Checkpoint(NamedTuple):
    """A checkpoint, as read from its file."""

    flat: dict[str, Tensor]  # tensors by path
    meta: dict[str, str]
    older_slots: tuple[dict[str, Tensor], ...] = ()  # of stacks on disk in the other checkpoints, the latest first
    warnings: tuple[str, ...] = ()  # one sentence per damaged checkpoint


@dataclass(frozen=True)
class CheckpointFolder:
    """The last `n_kept` checkpoints of a run, one file per round.

    A file appears under its name when all of it is on the disk. Before, the rows of stacks on disk become durable. They
    may be overwritten when no kept checkpoint needs them.
    """

    folder: Path
    n_kept: int = KEPT_CHECKPOINTS
    needed: frozenset[int] = frozenset()
    """Rounds whose checkpoints stay, however old they are."""

    @property
    def has_any(self) -> bool:
        """True if there is a checkpoint, readable or not."""
        return bool(self._files())

    def save(self, round_: int, tree: Mapping[str, Any], meta: Mapping[str, str]) -> None:
        """Write the state after a round, and remove checkpoints older than the last `n_kept`."""
        leaves = flatten_tree(tree)
        on_disk = {f"{k}/{SLOTS_KEY}": leaf for k, leaf in leaves.items() if isinstance(leaf, DiskRows)}
        for stack in on_disk.values():
            stack.sync()
        in_memory = {k: leaf for k, leaf in leaves.items() if not isinstance(leaf, DiskRows)}
        flat = copy_tensors(in_memory | {k: stack.slots for k, stack in on_disk.items()})
        text = {**meta, "format": str(CHECKPOINT_FORMAT)}
        self.folder.mkdir(exist_ok=True)
        save_tensors(self.folder / f"{round_:06d}.safetensors", flat, text | {"checksum": compute_checksum(flat, text)})
        self._prune()
        if os.name == "posix":
            fd = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for stack in on_disk.values():
            stack.commit()

    def forget_after(self, round_: int) -> None:
        for path in self._files():
            if int(path.stem) > round_:
                path.unlink()

    def load_round(self, round_: int) -> Checkpoint | None:
        """Read the checkpoint of one round; None if it is missing or damaged."""
        path = self.folder / f"{round_:06d}.safetensors"
        try:
            return self._read(path) if path.exists() else None
        except DamagedCheckpointError:
            return None

    def load(self) -> Checkpoint:
        """Read the latest undamaged checkpoint; rename damaged ones, so that nobody tries them again."""
        intact: list[Checkpoint] = []
        damaged: dict[Path, str] = {}
        for path in self._files():
            try:
                intact.append(self._read(path))
            except DamagedCheckpointError as error:
                damaged[path] = str(error)
            if len(intact) == self.n_kept:
                break
        if not intact:
            raise RunError(f"{'; '.join(damaged.values())}; {self._start_again}")
        for path in damaged:
            path.replace(path.with_suffix(".damaged"))
        self._prune()
        newest, *others = intact
        older = [{k: v for k, v in one.flat.items() if k.endswith(f"/{SLOTS_KEY}")} for one in others]
        warnings = [f"{why}; it is called {path.stem}.damaged now" for path, why in damaged.items()]
        return newest._replace(older_slots=tuple(older), warnings=tuple(warnings))

    def load_latest(self) -> Checkpoint:
        """Read the latest checkpoint, where no earlier one would do."""
        if not (files := self._files()):
            raise RunError(f"{self.folder} holds no checkpoint; {self._start_again}")
        try:
            return self._read(files[0])
        except DamagedCheckpointError as error:
            raise RunError(f"{error}; {self._start_again}") from error

    @property
    def _start_again(self) -> str:
        return f"expected an undamaged one; remove {self.folder.parent}, and start the run again"

    def _files(self) -> list[Path]:
        paths = (path for path in self.folder.glob("*.safetensors") if path.stem.isdecimal())
        return sorted(paths, key=lambda path: int(path.stem), reverse=True)

    def _read(self, path: Path) -> Checkpoint:
        try:
            flat, meta = load_tensors(path)
        except RunError as error:
            raise DamagedCheckpointError(f"the checkpoint {path} is damaged ({error.__cause__})") from error
        recorded_checksum = meta.pop("checksum", "none")
        if (checksum := compute_checksum(flat, meta)) != recorded_checksum:
            raise DamagedCheckpointError(
                f"the checkpoint {path} is damaged (its checksum is {checksum}, expected {recorded_checksum})"
            )
        if int(meta["format"]) > CHECKPOINT_FORMAT:
            raise RunError(
                f"the checkpoint {path} was written by a newer FedAttune: got format {meta['format']}, expected "
                f"at most {CHECKPOINT_FORMAT}; continue with that version"
            )
        return Checkpoint(flat, meta)

    def _prune(self) -> None:
        """Remove old checkpoints, and files of processes that were killed while writing."""
        old = [path for path in self._files()[self.n_kept :] if int(path.stem) not in self.needed]
        for path in [*old, *unfinished_files(self.folder)]:
            path.unlink()


def compute_checksum(flat: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """Compute the CRC-32 of all tensors, their names, types and shapes, and of the text."""
    names = sorted(flat)
    head = [[k, str(flat[k].dtype), list(flat[k].shape)] for k in names]
    crc = zlib.crc32(json.dumps([head, sorted(meta.items())]).encode())
    for name in names:
        crc = zlib.crc32(flat[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
