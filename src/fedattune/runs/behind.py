"""Rows written to a file while the run goes on: the system takes longer over new ones than a round has to spare."""

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError

AT_ONCE = 1 << 26
"""Bytes of rows that wait to be written at most, or one row."""

Slot = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class Behind:
    """Writes batches of rows to the file `fd` in the background, each after the one before.

    Attributes:
        at_once: rows that a batch has at most.

    """

    def __init__(self, fd: int, row_bytes: int, where: str) -> None:
        self.at_once = max(1, AT_ONCE // max(1, row_bytes))
        self._fd, self._where = fd, where
        self._rows = np.empty((0, row_bytes), dtype=np.uint8)
        self._slots = np.empty(0, dtype=np.int32)
        self._writing: Future[None] | None = None
        # It has no thread before the first row.
        self._writer = ThreadPoolExecutor(1, "fedattune-rows", _give_way)

    def room(self, n: int) -> Bytes:
        """Room (n, bytes) for the rows of the next batch, once the last one is written."""
        self.wait()
        if n > len(self._rows):
            self._rows = np.empty((n, self._rows.shape[1]), dtype=np.uint8)
        return self._rows[:n]

    def write(self, slots: Slot) -> None:
        """Write the rows that were put into `room` to these slots."""
        self._slots = slots
        self._writing = self._writer.submit(_write, self._fd, self._rows[: len(slots)], slots)

    def found(self, slots: Slot) -> tuple[Bytes, NDArray[np.intp]] | None:
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


def _give_way() -> None:
    """Leave the core to clients that train on it."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def disk_error(what: str, where: str, error: OSError) -> RunError:
    """What to say where a file of rows cannot be opened or written."""
    todo = "free some space, or give another folder (--out, or TMPDIR where there is none)"
    return RunError(f"cannot {what} {where}: {error.strerror or error}; {todo}")


def _write(fd: int, rows: Bytes, slots: Slot) -> None:
    """Write rows to their slots; those that lie beside each other there in one call."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(slots)]):
        left, at = rows[start:stop].reshape(-1).data, int(slots[start]) * rows.shape[1]
        while left:
            done = os.pwrite(fd, left, at)
            left, at = left[done:], at + done
