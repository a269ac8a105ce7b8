"""Store one row per client: in memory, or on disk, read and written only for the clients of a round."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError
from ...core.hardware import use_threads
from ...core.params import Params
from ...core.payload import ServerState
from ...core.settings import Settings
from ...core.task import Task
from .slot_file import SlotFile

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
        self._first, self._each, self._n = first, each or Params(), n
        self._file = SlotFile(first, n, path)
        self._names = list(first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def keys(self) -> list[str]:
        """List the names of the tensors."""
        return list(self._names)

    def only(self, names: Iterable[str]) -> "DiskRows":
        """Select tensors by name, in this order, from the same file."""
        part = object.__new__(DiskRows)
        part.__dict__ |= self.__dict__ | {"_names": list(names)}
        return part

    def without(self, names: Iterable[str]) -> "DiskRows":
        """Select all tensors except these, from the same file."""
        excluded = set(names)
        return self.only(name for name in self._names if name not in excluded)

    def rows(self, ids: Tensor | int | slice) -> Params:
        """Read rows of clients `ids` into memory; a single number gives one row without a leading axis."""
        if isinstance(ids, int):
            return self.rows(torch.tensor([ids])).map(lambda a: a[0])
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(self._n))
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
            ids.cpu().numpy(),
            {k: new[k].detach().to("cpu", self._first[k].dtype).contiguous() for k in self._first},
        )
        return self

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._file.row_bytes

    @property
    def n(self) -> int:
        """Number of clients N."""
        return self._n

    def split_clients(self, ids: Tensor) -> Iterator[Tensor]:
        """Split clients `ids` into chunks whose rows take little memory."""
        return iter(torch.split(ids, max(1, SWEEP_BYTES // max(1, self.row_bytes))))

    @property
    def slots(self) -> Tensor:
        """Slot of each client's row, int32 (N,); a checkpoint needs nothing else."""
        return torch.from_numpy(self._file.slots)

    def sync(self) -> None:
        """Make all written rows durable; call this before the slots are saved."""
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
        """Apply `f` as `Params` does; the result is lazy, too."""
        return LazyModel(super().map(f, *others))

    def copies(self, n: int) -> Params:
        """Return a lazy stack of `n` copies."""
        return LazyRows(self.repeat(n))

    def repeat(self, n: int) -> Params:
        """Repeat the model as `Params` does."""
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
    def choose(
        cls, settings: Settings, n: int, row_bytes: int, folder: Path | None, *, is_small: bool = False
    ) -> "RowStorage":
        """Choose memory or disk by the settings.

        Args:
            settings: settings of the run; `client_state` decides, or with `auto` the size.
            n: clients.
            row_bytes: size of all rows of one client.
            folder: folder for the files; without it, temporary files.
            is_small: whether a round is little work for the processor.

        """
        is_on_disk = settings.client_state == "disk"
        if settings.client_state == "auto":
            is_on_disk = n * row_bytes > AUTO_MEMORY_BYTES
        return cls(n, is_on_disk, folder, is_small)

    def share_cores(self) -> AbstractContextManager[None]:
        """Use one thread inside the block while rows go to disk: small operations would wait for the writer's core."""
        return use_threads(1) if self.is_on_disk and self.is_small else nullcontext()

    def allocate(self, name: str, row: Params, each: Params | None = None) -> RowStack:
        """Make a writable stack of N rows.

        Args:
            name: name of the stack, and of its file.
            row: the value of every row.
            each: tensors (N, ...) that replace their entries in `row`.

        """
        if self.is_on_disk and row:
            return DiskRows(row, self.n, make_rows_path(self.folder, name), each)
        return Params({**row.copies(self.n), **(each or {})})

    def allocate_server(self, server_state: ServerState) -> ServerState:
        """Make the stacks in the server's initial state writable."""
        return {
            name: cast(Params, self.allocate(f"server/{name}", part.rows(0)))
            if isinstance(part, LazyRows)
            else part
            for name, part in server_state.items()
        }


def count_row_bytes(algorithm: Algorithm, task: Task, server_state: ServerState) -> int:
    """Count the bytes that a run keeps for one client; `server_state` is the initial state with its lazy stacks."""
    w0 = task.params
    parts = [
        *algorithm.client.init_local_state(w0).values(),
        w0.only(algorithm.personal.names(task.model)),
        task.buffers,
    ]
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
    """Check that clients can join after training: the rows of the server must then fit into memory.

    Raises:
        ConfigError: the rows take too much memory.
    """
    # The type of a server's state does not tell of stacks on disk.
    stacks = [part for part in cast(dict[str, object], server_state).values() if isinstance(part, DiskRows)]
    n_bytes = sum(stack.n * stack.row_bytes for stack in stacks)
    if n_bytes > NEWCOMER_MEMORY_BYTES:
        raise ConfigError(
            f"clients cannot join after training: the server keeps {n_bytes / 2**30:.1f} GiB of the models of "
            f"{stacks[0].n:,} clients, expected at most {NEWCOMER_MEMORY_BYTES >> 30} GiB, as joining loads them "
            "into memory; leave held_out at 0, train fewer clients, or choose a method that keeps one model (fedavg_ft)"
        )


def load_server_rows(server_state: ServerState) -> ServerState:
    """Load all rows of the server's state into memory.

    Raises:
        ConfigError: the rows take too much memory.
    """
    check_newcomer_memory(server_state)
    return {k: part if isinstance(part, Tensor) else load_rows(part) for k, part in server_state.items()}


def load_rows(stack: RowStack) -> Params:
    """Load all rows of a stack into memory."""
    return stack if isinstance(stack, Params) else stack.rows(slice(None))
