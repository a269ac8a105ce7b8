"""A file of rows of one size, in which a crash leaves the rows of the last checkpoints as they were.

Rows written to a file while the run goes on: the system takes longer over new ones than a round has to spare.
"""

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import RunError
from ...core.params import Params

QUEUE_BYTES = 1 << 26
"""Bytes of rows that wait to be written at most, or one row."""


SlotIndex = NDArray[np.int32]


Bytes = NDArray[np.uint8]


class BackgroundWriter:
    """Writes batches of rows to the file `fd` in the background, each after the one before.

    Attributes:
        at_once: rows that a batch has at most.

    """

    def __init__(self, fd: int, row_bytes: int, where: str) -> None:
        self.at_once = max(1, QUEUE_BYTES // max(1, row_bytes))
        self._fd, self._where = fd, where
        self._rows = np.empty((0, row_bytes), dtype=np.uint8)
        self._slots = np.empty(0, dtype=np.int32)
        self._writing: Future[None] | None = None
        # It has no thread before the first row.
        self._writer = ThreadPoolExecutor(1, "fedattune-rows", _lower_priority)

    def room(self, n: int) -> Bytes:
        """Room (n, bytes) for the rows of the next batch, once the last one is written."""
        self.wait()
        if n > len(self._rows):
            self._rows = np.empty((n, self._rows.shape[1]), dtype=np.uint8)
        return self._rows[:n]

    def write(self, slots: SlotIndex) -> None:
        """Write the rows that were put into `room` to these slots."""
        self._slots = slots
        self._writing = self._writer.submit(_write_rows, self._fd, self._rows[: len(slots)], slots)

    def found(self, slots: SlotIndex) -> tuple[Bytes, NDArray[np.intp]] | None:
        """Rows that wait to be written, and which of them are in these slots; None if these are in the file."""
        if self._writing is None or not (waiting := np.isin(slots, self._slots)).any():
            return None
        if not waiting.all():
            self.wait()
            return None
        order = np.argsort(self._slots)
        return self._rows, order[np.searchsorted(self._slots, slots, sorter=order)]

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            RunError: it could not be.

        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            raise disk_error("write", self._where, error) from error

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.shutdown()
        os.close(self._fd)


def _lower_priority() -> None:
    """Leave the core to clients that train on it."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def disk_error(what: str, where: str, error: OSError) -> RunError:
    """What to say where a file of rows cannot be opened or written."""
    todo = "free some space, or give another folder (--out, or TMPDIR where there is none)"
    return RunError(f"cannot {what} {where}: {error.strerror or error}; {todo}")


def _write_rows(fd: int, rows: Bytes, slots: SlotIndex) -> None:
    """Write rows to their slots; those that lie beside each other there in one call."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(slots)]):
        left, at = rows[start:stop].reshape(-1).data, int(slots[start]) * rows.shape[1]
        while left:
            done = os.pwrite(fd, left, at)
            left, at = left[done:], at + done


MAX_BUFFERS = 512
"""Tensors of one row in one call of the system; it takes 1024 at most."""


KEPT_CHECKPOINTS = 2
"""Checkpoints whose rows are not written over: if the last one cannot be read, there is the one before."""


class SlotFile:
    """A file of rows of one size, and which client's row is where.

    Rows are written in the background. So a full disk may be said at a later call, but by `sync` at the latest.
    """

    def __init__(self, first: Params, n: int, path: Path | None) -> None:
        self._layout: dict[str, tuple[int, int, Tensor]] = {}
        self.row_bytes = 0
        for name, tensor in first.items():
            size = tensor.numel() * tensor.element_size()
            self._layout[name] = (self.row_bytes, size, tensor)
            self.row_bytes += size
        self.slots = np.full(n, -1, dtype=np.int32)
        self._kept = path is not None
        self._path = path
        self._saved = np.zeros(0, dtype=bool)  # per slot: whether its row is one of a checkpoint that is kept
        self._free: list[int] = []
        self._left: list[NDArray[np.int32]] = []  # slots of the last checkpoint whose rows have moved
        self._waiting: list[
            list[NDArray[np.int32]]
        ] = []  # what was left before, per checkpoint, the oldest first
        self._taken: list[NDArray[np.int32]] = []  # slots taken since the last checkpoint
        try:
            if path is None:
                self._fd, name = tempfile.mkstemp(prefix="fedattune-", suffix=".rows")
                os.unlink(name)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise disk_error("open", self._where, error) from error
        self._behind = BackgroundWriter(self._fd, self.row_bytes, self._where)
        weakref.finalize(self, BackgroundWriter.close, self._behind)

    def read(self, slots: NDArray[np.int32], names: Sequence[str]) -> dict[str, Tensor]:
        """The rows (C, ...) of some slots."""
        # All begin where PyTorch lets tensors begin: the last bit of a product may depend on it.
        found = {k: torch.empty(len(slots), self._layout[k][1], dtype=torch.uint8) for k in names}
        if (waiting := self._behind.found(slots)) is not None:
            rows, places = waiting
            columns = self._columns(rows)
            for k, v in found.items():
                v.numpy()[:] = columns[k][places]
        else:
            self._read(slots, {k: v.numpy() for k, v in found.items()})
        return {k: self._typed(found[k], self._layout[k][2]) for k in names}

    def _read(self, slots: NDArray[np.int32], into: dict[str, Bytes]) -> None:
        """Read tensors of the rows in some slots straight to where they are wanted."""
        for run in self._runs(list(into)):
            offset = self._layout[run[0]][0]
            size = sum(self._layout[k][1] for k in run)
            for slot, *row in zip(slots.tolist(), *(into[k] for k in run), strict=True):
                if (got := os.preadv(self._fd, row, slot * self.row_bytes + offset)) != size:
                    raise RunError(
                        f"{self._where}: got {got} bytes of a client's row, expected {size}: the file was cut or "
                        "changed; start a new run"
                    )

    def write(self, clients: NDArray[np.int64], new: dict[str, Tensor]) -> None:
        """Write the rows of some clients, each to the slot that it may have; `new` may change afterwards."""
        slots = self._place(clients)
        raw = {k: self._bytes(new[k]) for k in self._layout}
        for start in range(0, len(slots), self._behind.at_once):
            some = slice(start, start + self._behind.at_once)
            for k, column in self._columns(self._behind.room(len(slots[some]))).items():
                column[:] = raw[k][some]
            self._behind.write(slots[some])

    def _columns(self, rows: Bytes) -> dict[str, Bytes]:
        """The bytes (C, b) of each tensor in some rows."""
        return {k: rows[:, start : start + size] for k, (start, size, _) in self._layout.items()}

    def _place(self, clients: NDArray[np.int64]) -> NDArray[np.int32]:
        """The slots that these clients' rows may be written to; those of checkpoints are left."""
        old = self.slots[clients]
        moves = np.flatnonzero((old < 0) | self._saved[old]) if len(self._saved) else np.arange(len(old))
        if len(moves):
            reused = sorted(self._free.pop() for _ in range(min(len(moves), len(self._free))))
            end = len(self._saved)
            more = len(moves) - len(reused)
            if end + more > len(self._saved):
                self._saved = np.concatenate([self._saved, np.zeros(more, dtype=bool)])
            taken = np.array([*reused, *range(end, end + more)], dtype=np.int32)
            before = old[moves]
            self._left.append(before[before >= 0])
            self._taken.append(taken)
            self.slots[clients[moves]] = taken
        return self.slots[clients]

    def sync(self) -> None:
        """Make what was written durable."""
        self._behind.wait()
        if self._kept and self._taken:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise disk_error("write", self._where, error) from error

    def commit(self) -> None:
        """The slots as they are were saved; those that only the oldest of `KEPT + 1` checkpoints needs become free."""
        if self._kept:
            self._waiting.append(self._left)
            for left in self._waiting.pop(0) if len(self._waiting) == KEPT_CHECKPOINTS else []:
                self._saved[left] = False
                self._free += left.tolist()
            for taken in self._taken:
                self._saved[taken] = True
            self._left, self._taken = [], []

    def restore(self, slots: NDArray[np.int32], *older: NDArray[np.int32]) -> None:
        """Go on from saved slots; all but these and those of `older` checkpoints, the last one first, are free."""
        wrong = [len(one) for one in (slots, *older) if one.shape != self.slots.shape]
        if wrong:
            raise RunError(
                f"{self._where}: the checkpoint is of {wrong[0]} clients, not of {len(self.slots)}; start a new run"
            )
        self._behind.wait()
        kept = np.unique(np.concatenate([slots, *older]))
        end = int(kept.max(initial=-1)) + 1
        if os.fstat(self._fd).st_size < (int(slots.max(initial=-1)) + 1) * self.row_bytes:
            raise RunError(f"{self._where} is missing or was cut: the checkpoint needs it; start a new run")
        self.slots = slots
        self._saved = np.zeros(end, dtype=bool)
        self._saved[kept[kept >= 0]] = True
        self._free = np.flatnonzero(~self._saved)[::-1].tolist()
        left = [np.setdiff1d(old, np.append(new, -1)) for new, old in pairwise((slots, *older))]
        self._left, self._taken, self._waiting = [], [], [[one] for one in reversed(left)]

    def _runs(self, names: Sequence[str]) -> list[list[str]]:
        """Names whose tensors lie beside each other in a row, few enough for one call."""
        order = list(self._layout)
        numbered = enumerate(sorted(order.index(name) for name in names))
        runs = [
            [order[i] for _, i in group] for _, group in groupby(numbered, key=lambda pair: pair[1] - pair[0])
        ]
        return [run[i : i + MAX_BUFFERS] for run in runs for i in range(0, len(run), MAX_BUFFERS)]

    @staticmethod
    def _typed(raw: Tensor, like: Tensor) -> Tensor:
        """Bytes (C, b) as rows of the shape and type of `like`."""
        if not raw.numel():
            return torch.empty(len(raw), *like.shape, dtype=like.dtype)
        return raw.reshape(-1).view(like.dtype).reshape(len(raw), *like.shape)

    @staticmethod
    def _bytes(rows: Tensor) -> Bytes:
        """Rows (C, ...) as bytes (C, b)."""
        if not rows.numel():
            return np.empty((len(rows), 0), dtype=np.uint8)
        found: Bytes = rows.reshape(-1).view(torch.uint8).reshape(len(rows), -1).numpy()
        return found

    @property
    def _where(self) -> str:
        return str(self._path or "a temporary file of clients' rows")
