"""The saved states of one run: written whole, checked when they are read, and the last ones kept."""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RunError
from .checkpoint import SLOTS, disk_rows, flattened, load_tensors, unfinished, write_flat
from .slots import KEPT

FORMAT = 1
"""Version of what a checkpoint holds; the checksum is made alike in all, so that a newer one is known to be whole."""


class DamagedError(RunError):
    """A checkpoint that is not what was written."""


class Saved(NamedTuple):
    """A checkpoint as it was read.

    Attributes:
        flat: its tensors, by path.
        meta: the text in it.
        older: slots of stacks on disk in the checkpoints before it that are kept, the last one first.
        said: a sentence where checkpoints were found damaged.

    """

    flat: dict[str, Tensor]
    meta: dict[str, str]
    older: tuple[dict[str, Tensor], ...] = ()
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoints:
    """The last `kept` checkpoints of a run, one file per round; `before` is the only one of an older FedAttune.

    A file appears under its name when all of it is on the disk. The rows of stacks on disk are made durable first,
    and may be written over when no kept checkpoint needs them.
    """

    folder: Path
    before: Path | None = None
    kept: int = KEPT

    @property
    def exist(self) -> bool:
        """Whether there is any, readable or not."""
        return bool(self._files())

    def save(self, round_: int, tree: Mapping[str, Any], meta: Mapping[str, str]) -> None:
        """Write the state after a round, and remove what is older than the last `kept`."""
        on_disk = disk_rows(tree)
        for stack in on_disk:
            stack.sync()
        flat, text = flattened(tree), {**meta, "format": str(FORMAT)}
        self.folder.mkdir(exist_ok=True)
        write_flat(self.folder / f"{round_:06d}.safetensors", flat, text | {"checksum": checksum(flat, text)})
        self._prune()
        _sync(self.folder)
        for stack in on_disk:
            stack.commit()

    def forget_after(self, round_: int) -> None:
        """Remove those of later rounds."""
        for path in self._files():
            if _round(path) > round_:
                path.unlink()

    def at(self, round_: int) -> Saved | None:
        """That of one round, if it is there and whole."""
        path = self.folder / f"{round_:06d}.safetensors"
        try:
            return self._read(path) if path.exists() else None
        except DamagedError:
            return None

    def load(self) -> Saved:
        """The last one that is whole; damaged ones get another name, so that nobody tries them again.

        Raises:
            RunError: none can be read.

        """
        whole: list[Saved] = []
        damaged: dict[Path, str] = {}
        for path in self._files():
            try:
                whole.append(self._read(path))
            except DamagedError as error:
                damaged[path] = str(error)
            if len(whole) == self.kept:
                break
        if not whole:
            raise RunError(f"{'; '.join(damaged.values())}; {self._start_again}")
        for path in damaged:
            path.replace(path.with_suffix(".damaged"))
        self._prune()
        newest, *others = whole
        older = [{k: v for k, v in one.flat.items() if k.endswith(f"/{SLOTS}")} for one in others]
        said = [f"{why}; it is called {path.stem}.damaged now" for path, why in damaged.items()]
        return newest._replace(older=tuple(older), said=tuple(said))

    def last(self) -> Saved:
        """The last one, where no earlier one would do.

        Raises:
            RunError: it cannot be read.

        """
        files = self._files()
        if not files:
            raise RunError(f"{self.folder} holds no checkpoint; {self._start_again}")
        try:
            return self._read(files[0])
        except DamagedError as error:
            raise RunError(f"{error}; {self._start_again}") from error

    @property
    def _start_again(self) -> str:
        return f"expected one that is whole; remove {self.folder.parent}, and start the run again"

    def _files(self) -> list[Path]:
        """All of them, the last one first."""
        found = [path for path in self.folder.glob("*.safetensors") if path.stem.isdecimal()]
        found.sort(key=lambda path: int(path.stem), reverse=True)
        return [*found, self.before] if self.before and self.before.exists() else found

    def _read(self, path: Path) -> Saved:
        try:
            flat, meta = load_tensors(path)
        except RunError as error:
            raise DamagedError(f"the checkpoint {path} is damaged ({error.__cause__})") from error
        if path == self.before:  # has no checksum
            return Saved(flat, meta)
        expected = meta.pop("checksum", "none")
        if (got := checksum(flat, meta)) != expected:
            raise DamagedError(
                f"the checkpoint {path} is damaged (its checksum is {got}, expected {expected})"
            )
        if int(meta["format"]) > FORMAT:
            raise RunError(
                f"the checkpoint {path} is of a newer FedAttune: got format {meta['format']}, expected at most "
                f"{FORMAT}; go on with that version"
            )
        return Saved(flat, meta)

    def _prune(self) -> None:
        """Remove what is older than the last ones, and what a killed process began to write."""
        for path in [*self._files()[self.kept :], *unfinished(self.folder)]:
            path.unlink()


def checksum(flat: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """CRC-32 of all tensors, their names, types and shapes, and of the text."""
    names = sorted(flat)
    head = [[k, str(flat[k].dtype), list(flat[k].shape)] for k in names]
    crc = zlib.crc32(json.dumps([head, sorted(meta.items())]).encode())
    for name in names:
        crc = zlib.crc32(flat[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _round(path: Path) -> int:
    """The round of a checkpoint; that of an older FedAttune says it nowhere but inside."""
    return int(path.stem) if path.stem.isdecimal() else 0


def _sync(folder: Path) -> None:
    """Make names of files durable, where the system can."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
