"""Store one row per client: in memory, or in a file that a crash leaves with the rows of the last checkpoints.

Rows are written in the background: the system takes longer to write new rows than a round can wait.
"""

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, RunError
from ..core.hardware import use_threads
from ..core.params import Params
from ..core.payload import ServerState
from ..core.settings import Settings
from ..core.task import Task

QUEUE_BYTES = 1 << 26
"""Bytes of rows that wait to be written (at least one row)."""
O_BINARY = getattr(os, "O_BINARY", 0)
"""Flag without which Windows changes line ends."""
_POSITION_LOCK = threading.Lock()
"""Guards the position of a file where the system has no calls that read and write at a place."""
SlotIndex = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class BackgroundWriter:
    """Write batches of rows to the file `fd` in the background, one batch after the other."""

    def __init__(self, fd: int, row_bytes: int, where: str) -> None:
        self.batch_rows = max(1, QUEUE_BYTES // max(1, row_bytes))  # at most
        self._fd, self._where = fd, where
        self._rows = np.empty((0, row_bytes), dtype=np.uint8)
        self._slots = np.empty(0, dtype=np.int32)
        self._writing: Future[None] | None = None
        # The thread starts with the first row.
        self._writer = ThreadPoolExecutor(1, "fedattune-rows", _lower_priority)

    def reserve(self, n: int) -> Bytes:
        """Return a buffer (n, bytes) for the next batch, once the last batch is written."""
        self.wait()
        if n > len(self._rows):
            self._rows = np.empty((n, self._rows.shape[1]), dtype=np.uint8)
        return self._rows[:n]

    def write(self, slots: SlotIndex) -> None:
        """Write the rows in the buffer of `reserve` to these slots."""
        self._slots = slots
        self._writing = self._writer.submit(_write_rows, self._fd, self._rows[: len(slots)], slots)

    def find_pending(self, slots: SlotIndex) -> tuple[Bytes, NDArray[np.intp]] | None:
        """Find rows that wait to be written: the buffer, and each slot's row in it; None if the file has the rows."""
        if self._writing is None or not (is_pending := np.isin(slots, self._slots)).any():
            return None
        if not is_pending.all():
            self.wait()
            return None
        order = np.argsort(self._slots)
        return self._rows, order[np.searchsorted(self._slots, slots, sorter=order)]

    def wait(self) -> None:
        """Wait until all rows are written."""
        writing, self._writing = self._writing, None
        if writing:
            with explain_disk_errors("write", self._where):
                writing.result()

    def close(self) -> None:
        self._writer.shutdown()
        os.close(self._fd)


def _lower_priority() -> None:
    if sys.platform == "linux":  # other systems have no priority per thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@contextmanager
def explain_disk_errors(what: str, where: str) -> Iterator[None]:
    """Turn errors of the disk while a file of rows is opened or written into one sentence."""
    try:
        yield
    except OSError as error:
        todo = "free some space, or give another folder (--out, or TMPDIR where there is none)"
        raise RunError(f"cannot {what} {where}: {error.strerror or error}; {todo}") from error


def _open_temporary() -> int:
    fd, name = tempfile.mkstemp(prefix="fedattune-", suffix=".rows")
    if sys.platform == "win32":  # an open file cannot be removed, but can be marked
        os.close(fd)
        return os.open(name, os.O_RDWR | os.O_BINARY | os.O_TEMPORARY)
    os.unlink(name)
    return fd


def _write_at(fd: int, content: memoryview, at: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, content, at)
    with _POSITION_LOCK:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, content)


def _read_at(fd: int, into: list[Any], at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, into, at)
    with _POSITION_LOCK:
        os.lseek(fd, at, os.SEEK_SET)
        content = os.read(fd, sum(len(one) for one in into))
    start = 0
    for one in into:
        piece = np.frombuffer(content[start : start + len(one)], dtype=np.uint8)
        one[: len(piece)] = piece
        start += len(one)
    return len(content)


def _write_rows(fd: int, rows: Bytes, slots: SlotIndex) -> None:
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(slots)]):
        remaining, at = rows[start:stop].reshape(-1).data, int(slots[start]) * rows.shape[1]
        while remaining:
            written = _write_at(fd, remaining, at)
            remaining, at = remaining[written:], at + written


MAX_BUFFERS = 512
"""Tensors of one row in one system call; the limit of the system is 1024."""
KEPT_CHECKPOINTS = 2
"""Checkpoints whose rows stay: if the last checkpoint cannot be read, there is the one before."""


class SlotFile:
    """A file of rows of equal size, and the slot of each client's row.

    A background thread writes the rows. So a later call may raise the error of a full disk, at the latest `sync`.
    """

    def __init__(self, first: Params, n: int, path: Path | None) -> None:
        self._layout: dict[str, tuple[int, int, Tensor]] = {}
        self.row_bytes = 0
        for name, tensor in first.items():
            size = tensor.numel() * tensor.element_size()
            self._layout[name] = (self.row_bytes, size, tensor)
            self.row_bytes += size
        self.slots = np.full(n, -1, dtype=np.int32)
        self._is_durable = path is not None
        self._where = str(path or "a temporary file of clients' rows")
        self._is_saved = np.zeros(0, dtype=bool)  # per slot: a kept checkpoint needs its row
        self._free: list[int] = []
        self._released: list[SlotIndex] = []  # slots of the last checkpoint whose clients have moved since
        self._released_before: list[list[SlotIndex]] = []  # the same per kept checkpoint, the oldest first
        self._new: list[SlotIndex] = []  # slots in use since the last checkpoint
        with explain_disk_errors("open", self._where):
            if path is None:
                self._fd = _open_temporary()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | O_BINARY, 0o644)
        self._writer = BackgroundWriter(self._fd, self.row_bytes, self._where)
        weakref.finalize(self, BackgroundWriter.close, self._writer)

    def read(self, slots: SlotIndex, names: Sequence[str]) -> dict[str, Tensor]:
        """Read the rows (C, ...) of slots."""
        # Use tensors aligned by PyTorch: the last bit of a product may depend on the alignment.
        raw = {k: torch.empty(len(slots), self._layout[k][1], dtype=torch.uint8) for k in names}
        into = {k: v.numpy() for k, v in raw.items()}
        if pending := self._writer.find_pending(slots):
            columns = self._columns(pending[0])
            for k, array in into.items():
                array[:] = columns[k][pending[1]]
        else:
            self._read(slots, into)
        return {k: self._to_rows(raw[k], self._layout[k][2]) for k in names}

    def _read(self, slots: SlotIndex, into: dict[str, Bytes]) -> None:
        """Read tensors of the rows in slots straight into the given arrays."""
        for run in self._group_adjacent(list(into)):
            offset = self._layout[run[0]][0]
            size = sum(self._layout[k][1] for k in run)
            for slot, *row in zip(slots.tolist(), *(into[k] for k in run), strict=True):
                if (n_bytes := _read_at(self._fd, row, slot * self.row_bytes + offset)) != size:
                    raise RunError(
                        f"{self._where}: got {n_bytes} bytes of a client's row, expected {size}: the file was cut or "
                        "changed; start a new run"
                    )

    def write(self, clients: NDArray[np.int64], new: dict[str, Tensor]) -> None:
        """Write rows of clients, each to a slot that may be overwritten; `new` may change afterwards."""
        slots = self._assign_slots(clients)
        raw = {k: self._to_bytes(new[k]) for k in self._layout}
        for start in range(0, len(slots), self._writer.batch_rows):
            batch = slice(start, start + self._writer.batch_rows)
            for k, column in self._columns(self._writer.reserve(len(slots[batch]))).items():
                column[:] = raw[k][batch]
            self._writer.write(slots[batch])

    def _columns(self, rows: Bytes) -> dict[str, Bytes]:
        """Split rows into the bytes (C, b) of each tensor."""
        return {k: rows[:, start : start + size] for k, (start, size, _) in self._layout.items()}

    def _assign_slots(self, clients: NDArray[np.int64]) -> SlotIndex:
        """Assign a slot to each client's row, without touching the slots of checkpoints."""
        old = self.slots[clients]
        moves = np.flatnonzero((old < 0) | self._is_saved[old]) if len(self._is_saved) else np.arange(len(old))
        if len(moves):
            reused = sorted(self._free.pop() for _ in range(min(len(moves), len(self._free))))
            end, more = len(self._is_saved), len(moves) - len(reused)
            self._is_saved = np.append(self._is_saved, np.zeros(more, dtype=bool))
            new = np.array([*reused, *range(end, end + more)], dtype=np.int32)
            before = old[moves]
            self._released.append(before[before >= 0])
            self._new.append(new)
            self.slots[clients[moves]] = new
        return self.slots[clients]

    def sync(self) -> None:
        """Make all written rows durable."""
        self._writer.wait()
        if self._is_durable and self._new:
            with explain_disk_errors("write", self._where):
                os.fsync(self._fd)

    def commit(self) -> None:
        """Mark the slots as saved; free slots that only the oldest of KEPT_CHECKPOINTS + 1 checkpoints needs."""
        if self._is_durable:
            self._released_before.append(self._released)
            full = len(self._released_before) == KEPT_CHECKPOINTS
            for slots in self._released_before.pop(0) if full else []:
                self._is_saved[slots] = False
                self._free += slots.tolist()
            for slots in self._new:
                self._is_saved[slots] = True
            self._released, self._new = [], []

    def restore(self, slots: SlotIndex, *older: SlotIndex) -> None:
        """Resume from saved slots; keep the slots of `older` checkpoints, the latest first, and free all others."""
        wrong = [len(one) for one in (slots, *older) if one.shape != self.slots.shape]
        if wrong:
            raise RunError(
                f"{self._where}: got a checkpoint of {wrong[0]} clients, expected {len(self.slots)}; start a new run"
            )
        self._writer.wait()
        live_slots = np.unique(np.concatenate([slots, *older]))
        end = int(live_slots.max(initial=-1)) + 1
        if os.fstat(self._fd).st_size < (int(slots.max(initial=-1)) + 1) * self.row_bytes:
            raise RunError(f"{self._where} is missing or was cut: the checkpoint needs it; start a new run")
        self.slots = slots
        self._is_saved = np.zeros(end, dtype=bool)
        self._is_saved[live_slots[live_slots >= 0]] = True
        self._free = np.flatnonzero(~self._is_saved)[::-1].tolist()
        released = [np.setdiff1d(old, np.append(new, -1)) for new, old in pairwise((slots, *older))]
        self._released, self._new = [], []
        self._released_before = [[slots] for slots in reversed(released)]

    def _group_adjacent(self, names: Sequence[str]) -> list[list[str]]:
        """Group names whose tensors are adjacent in a row, at most MAX_BUFFERS per system call."""
        order = list(self._layout)
        numbered = enumerate(sorted(order.index(name) for name in names))
        runs = [[order[i] for _, i in group] for _, group in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
        return [run[i : i + MAX_BUFFERS] for run in runs for i in range(0, len(run), MAX_BUFFERS)]

    @staticmethod
    def _to_rows(raw: Tensor, like: Tensor) -> Tensor:
        """View bytes (C, b) as rows of the shape and type of `like`."""
        if not raw.numel():
            return torch.empty(len(raw), *like.shape, dtype=like.dtype)
        return raw.reshape(-1).view(like.dtype).reshape(len(raw), *like.shape)

    @staticmethod
    def _to_bytes(rows: Tensor) -> Bytes:
        """View rows (C, ...) as bytes (C, b)."""
        if not rows.numel():
            return np.empty((len(rows), 0), dtype=np.uint8)
        raw: Bytes = rows.reshape(-1).view(torch.uint8).reshape(len(rows), -1).numpy()
        return raw


SWEEP_BYTES = 1 << 26
"""Bytes that are read or written at a time when a loop runs over all rows."""


class DiskRows:
    """The tensors of N clients in one file, one row per client, with the stack methods of `Params`.

    Rows that were never written are initial rows and take no space: `first` for all clients, except for the tensors
    in `each` (N, ...). A slot of the file holds a client's row; `slots` (N,) gives its number, -1 for the initial row.
    Rows of the last KEPT_CHECKPOINTS checkpoints are never overwritten: a changed row goes to another slot (shadow
    paging). So slots that were saved with one of these checkpoints, after `sync`, give back exactly its rows.

    Without a path, the file is temporary and goes away with the process.
    """

    def __init__(self, first: Params, n: int, path: Path | None = None, each: Params | None = None) -> None:
        self.n, self._first, self._each = n, first, each or Params()
        self._file = SlotFile(first, n, path)
        self.row_bytes = self._file.row_bytes
        self._names = list(first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def keys(self) -> list[str]:
        return list(self._names)

    def only(self, names: Iterable[str]) -> "DiskRows":
        part = object.__new__(DiskRows)
        part.__dict__ |= self.__dict__ | {"_names": list(names)}
        return part

    def rows(self, ids: Tensor | int | slice) -> Params:
        """Read rows of clients `ids` into memory; a single number gives one row without a leading axis."""
        if isinstance(ids, int):
            return self.rows(torch.tensor([ids])).map(lambda a: a[0])
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(self.n))
        clients = ids.reshape(-1).cpu()
        slots = self._file.slots[clients.numpy()]
        written = np.flatnonzero(slots >= 0)
        read = self._file.read(slots[written], self._names)
        tensors = {}
        for name in self._names:
            first, rows = self._first[name], read[name]
            if len(written) < len(slots):
                rows = self._unwritten(name, clients).index_copy_(0, torch.from_numpy(written), rows)
            tensors[name] = rows.to(first.device).reshape(*ids.shape, *first.shape)
        return Params(tensors)

    def _unwritten(self, name: str, clients: Tensor) -> Tensor:
        """Return the initial rows of one tensor for these clients, on the CPU."""
        if name in self._each:
            return self._each[name][clients.to(self._each[name].device)].cpu()
        return self._first[name].cpu().repeat(len(clients), *[1] * self._first[name].dim())

    def put_rows(self, ids: Tensor, new: Params) -> Self:
        """Write rows `new` of clients `ids`, each client at most once."""
        if not len(ids) or not self._names:
            return self
        if len(self._names) < len(self._first):
            stack = self.only(self._first)
            stack.put_rows(ids, Params({**stack.rows(ids), **new.only(self._names)}))
            return self
        self._file.write(
            ids.cpu().numpy(), {k: new[k].detach().to("cpu", self._first[k].dtype).contiguous() for k in self._first}
        )
        return self

    def split_clients(self, ids: Tensor) -> Iterator[Tensor]:
        """Split clients `ids` into chunks whose rows take little memory."""
        return iter(torch.split(ids, max(1, SWEEP_BYTES // max(1, self.row_bytes))))

    @property
    def slots(self) -> Tensor:
        """Slot of each client's row, int32 (N,); a checkpoint needs nothing else."""
        return torch.from_numpy(self._file.slots)

    def sync(self) -> None:
        self._file.sync()

    def commit(self) -> None:
        """Mark the slots as saved: their rows stay until KEPT_CHECKPOINTS other checkpoints have followed."""
        self._file.commit()

    def restore(self, slots: Tensor, older: Sequence[Tensor] = ()) -> Self:
        """Resume from saved slots; keep the rows of `older` checkpoints, the latest first, as well."""
        self._file.restore(*(one.cpu().numpy().astype(np.int32) for one in (slots, *older)))
        return self


def make_rows_path(folder: Path | None, name: str) -> Path | None:
    """Return the file of the stack called `name` in checkpoints."""
    return folder / f"{name.replace('/', '.')}.rows" if folder else None


RowStack: TypeAlias = Params | DiskRows
"""One row per client, with the methods `only`, `without`, `rows` and `put_rows`."""
AUTO_MEMORY_BYTES = 1 << 30
"""Bytes of client rows above which `client_state="auto"` uses the disk."""
NEWCOMER_MEMORY_BYTES = 4 << 30
"""Bytes of rows on disk that the server may keep if clients join later: joining loads these rows into memory."""


class LazyRows(Params):
    """A stack of equal rows without memory of its own, until `RowStorage.allocate_server` makes it writable."""


class LazyModel(Params):
    """A model whose copies take no memory, for server rules that begin with one row per client."""

    def map(self, f: Callable[..., Tensor], *others: Params) -> Params:
        return LazyModel(super().map(f, *others))

    def copies(self, n: int) -> Params:
        """Return a lazy stack of `n` copies."""
        return LazyRows(self.repeat(n))

    def repeat(self, n: int) -> Params:
        return Params({k: v.expand(n, *v.shape) for k, v in self.items()})


@dataclass(frozen=True)
class RowStorage:
    """A factory of stacks of `n` rows: in memory, or in files of `folder` (temporary files without a folder).

    `is_small` says that the operations of a round are too small to gain from more than one core.
    """

    n: int
    is_on_disk: bool = False
    folder: Path | None = None
    is_small: bool = False

    @classmethod
    def choose(cls, settings: Settings, n: int, row_bytes: int, folder: Path | None, *, is_small: bool = False) -> Self:
        """Choose memory or disk by the setting `client_state`, which with `auto` looks at the size."""
        how = settings.execution.client_state
        is_on_disk = n * row_bytes > AUTO_MEMORY_BYTES if how == "auto" else how == "disk"
        return cls(n, is_on_disk, folder, is_small)

    def share_cores(self) -> AbstractContextManager[None]:
        """Use one thread inside the block while rows go to disk: small operations would wait for the writer's core."""
        return use_threads(1) if self.is_on_disk and self.is_small else nullcontext()

    def allocate(self, name: str, row: Params, each: Params | None = None) -> RowStack:
        """Make a writable stack of N rows; tensors (N, ...) in `each` replace their entries in `row`."""
        if self.is_on_disk and row:
            return DiskRows(row, self.n, make_rows_path(self.folder, name), each)
        return Params({**row.copies(self.n), **(each or {})})

    def allocate_server(self, server_state: ServerState) -> ServerState:
        """Make the stacks in the server's initial state writable."""
        return {
            name: self.allocate(f"server/{name}", part.rows(0)) if isinstance(part, LazyRows) else part
            for name, part in server_state.items()
        }


def count_row_bytes(algorithm: Algorithm, task: Task, server_state: ServerState) -> int:
    """Count the bytes that a run keeps for one client; `server_state` is the initial state with its lazy stacks."""
    w0 = task.params
    parts = [*algorithm.client.init_local_state(w0).values(), task.buffers]
    parts.append(w0.only(algorithm.personal.names(task.model)))
    parts += [part.rows(0) for part in server_state.values() if isinstance(part, LazyRows)]
    if algorithm.participation.receive == "answer":
        parts.append(w0)
    return sum(part.nbytes() for part in parts)


def drop_laziness(server_state: ServerState) -> ServerState:
    """Return the state with lazy models as ordinary ones."""
    return {k: Params(v) if isinstance(v, LazyModel) else v for k, v in server_state.items()}


def pick_rows(stack: RowStack, ids: Tensor, n: int) -> Params:
    """Read rows of clients `ids`, sorted; do not copy a stack in memory if these are all `n` clients."""
    return stack if isinstance(stack, Params) and len(ids) == n else stack.rows(ids)


def check_newcomer_memory(server_state: ServerState) -> None:
    """Check that clients can join after training: the rows of the server must then fit into memory."""
    stacks = [part for part in server_state.values() if isinstance(part, DiskRows)]
    n_bytes = sum(stack.n * stack.row_bytes for stack in stacks)
    if n_bytes > NEWCOMER_MEMORY_BYTES:
        raise ConfigError(
            f"clients cannot join after training: the server keeps {n_bytes / 2**30:.1f} GiB of the models of "
            f"{stacks[0].n:,} clients, expected at most {NEWCOMER_MEMORY_BYTES >> 30} GiB, as joining loads them "
            "into memory; leave held_out at 0, train fewer clients, or choose a method that keeps one model (fedavg_ft)"
        )


def load_server_rows(server_state: ServerState) -> ServerState:
    """Load all rows of the server's state into memory."""
    check_newcomer_memory(server_state)
    return {k: part if isinstance(part, Tensor) else load_rows(part) for k, part in server_state.items()}


def load_rows(stack: RowStack) -> Params:
    """Load all rows of a stack into memory."""
    return stack if isinstance(stack, Params) else stack.rows(slice(None))
