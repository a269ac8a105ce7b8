"""Where the rows of many clients are kept: in memory, or in files of the run.

Stacks of client rows on disk: read and written only for the clients that are asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError
from ...core.params import Params
from ...core.payload import ServerState
from ...core.settings import Settings
from ...core.task import Task
from .slot_file import SlotFile

SWEEP_BYTES = 1 << 26
"""Bytes that are read or written at once where all rows are gone through."""


class DiskRows:
    """The tensors of N clients in one file, one row per client, with the methods of `Params` that stacks need.

    Rows that were never written are the first ones and take no space: `first` for everybody, but `each` (N, ...)
    for the tensors in it. A client's row is in a slot of the file; `slots` (N,) says in which, -1 for the first
    row. Rows of the last `KEPT` checkpoints are not written over: a changed one goes to another slot (shadow
    paging). So slots that were saved, after `sync`, with one of these checkpoints give back exactly its rows.

    Without a path, the file is a temporary one that goes away with the process.
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
        """The names of the tensors."""
        return list(self._names)

    def only(self, names: Iterable[str]) -> "DiskRows":
        """The tensors called `names`, in this order, of the same file."""
        part = object.__new__(DiskRows)
        part.__dict__ |= self.__dict__ | {"_names": list(names)}
        return part

    def without(self, names: Iterable[str]) -> "DiskRows":
        """All tensors but those called `names`, of the same file."""
        gone = set(names)
        return self.only(name for name in self._names if name not in gone)

    def rows(self, ids: Tensor | int | slice) -> Params:
        """The rows of clients `ids`, in memory; a number gives one without a leading axis."""
        if isinstance(ids, int):
            return self.rows(torch.tensor([ids])).map(lambda a: a[0])
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(self._n))
        clients = ids.reshape(-1).cpu()
        slots = self._file.slots[clients.numpy()]
        written = np.flatnonzero(slots >= 0)
        read = self._file.read(slots[written], self._names)
        found = {}
        for name in self._names:
            first, rows = self._first[name], read[name]
            if len(written) < len(slots):
                rows = self._unwritten(name, clients).index_copy_(0, torch.from_numpy(written), rows)
            found[name] = rows.to(first.device).reshape(*ids.shape, *first.shape)
        return Params(found)

    def _unwritten(self, name: str, clients: Tensor) -> Tensor:
        """What one tensor of these clients is before it is written, on the CPU."""
        if name in self._each:
            return self._each[name][clients.to(self._each[name].device)].cpu()
        return self._first[name].cpu().repeat(len(clients), *[1] * self._first[name].dim())

    def put_rows(self, ids: Tensor, new: Params) -> Self:
        """Write the rows `new` of clients `ids`, each of which is named once."""
        if not len(ids) or not self._names:
            return self
        if len(self._names) < len(self._first):
            whole = self.only(self._first)
            whole.put_rows(ids, Params({**whole.rows(ids), **new.only(self._names)}))
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

    def stretches(self, ids: Tensor) -> Iterator[Tensor]:
        """Clients `ids` in stretches whose rows take little memory."""
        return iter(torch.split(ids, max(1, SWEEP_BYTES // max(1, self.row_bytes))))

    @property
    def slots(self) -> Tensor:
        """Where each client's row is, int32 (N,); all that a checkpoint needs to know."""
        return torch.from_numpy(self._file.slots)

    def sync(self) -> None:
        """Make what was written durable; before the slots are saved."""
        self._file.sync()

    def commit(self) -> None:
        """Note that the slots were saved: their rows stay until `KEPT` other checkpoints have followed."""
        self._file.commit()

    def restore(self, slots: Tensor, older: Sequence[Tensor] = ()) -> Self:
        """Go on from saved slots; the rows of `older` checkpoints, the last one first, are kept too."""
        self._file.restore(*(one.cpu().numpy().astype(np.int32) for one in (slots, *older)))
        return self


def rows_path(folder: Path | None, name: str) -> Path | None:
    """The file of a stack that the checkpoint calls `name`."""
    return folder / f"{name.replace('/', '.')}.rows" if folder else None


RowStack: TypeAlias = Params | DiskRows
"""One row per client, with the methods `only`, `without`, `rows` and `put_rows`."""


AUTO_MEMORY_BYTES = 1 << 30
"""Bytes of client rows above which `client_state="auto"` keeps them on disk."""


NEWCOMER_MEMORY_BYTES = 4 << 30
"""Bytes of rows that the server may keep on disk if clients are to join, who take them into memory."""


class LazyRows(Params):
    """A stack of equal rows without memory of its own, until `RowStorage.allocate_server` makes it writable."""


class LazyModel(Params):
    """A model whose copies take no memory, for server rules that begin with a row per client."""

    def map(self, f: Callable[..., Tensor], *others: Params) -> Params:
        """As `Params`; what comes of it is spare too."""
        return LazyModel(super().map(f, *others))

    def copies(self, n: int) -> Params:
        """A stack of `n` copies that is given room later."""
        return LazyRows(self.repeat(n))

    def repeat(self, n: int) -> Params:
        """As `Params`."""
        return Params({k: v.expand(n, *v.shape) for k, v in self.items()})


@dataclass(frozen=True)
class RowStorage:
    """Room for stacks of `n` rows: in memory, or, on `disk`, in files of `folder` (temporary ones without it)."""

    n: int
    disk: bool = False
    folder: Path | None = None

    @classmethod
    def choose(cls, settings: Settings, n: int, row_bytes: int, folder: Path | None) -> "RowStorage":
        """The room that the settings ask for; `row_bytes` are all that is kept for one client."""
        disk = settings.client_state == "disk"
        if settings.client_state == "auto":
            disk = n * row_bytes > AUTO_MEMORY_BYTES
        return cls(n, disk, folder)

    def allocate(self, name: str, row: Params, each: Params | None = None) -> RowStack:
        """A stack that can be written, each row of which is `row` at first, but for tensors `each` (N, ...)."""
        if self.disk and row:
            return DiskRows(row, self.n, rows_path(self.folder, name), each)
        return Params({**row.copies(self.n), **(each or {})})

    def allocate_server(self, server: ServerState) -> ServerState:
        """The server's first state, with room for what it keeps of every client."""
        return {
            name: cast(Params, self.allocate(f"server/{name}", part.rows(0)))
            if isinstance(part, LazyRows)
            else part
            for name, part in server.items()
        }


def row_bytes(algorithm: Algorithm, task: Task, server: ServerState) -> int:
    """Bytes that a run keeps for one client; `server` is the first state, not settled yet."""
    w0 = task.params
    kept = [
        *algorithm.client.init_local_state(w0).values(),
        w0.only(algorithm.personal.names(task.model)),
        task.buffers,
    ]
    kept += [part.rows(0) for part in server.values() if isinstance(part, LazyRows)]
    if algorithm.participation.receive == "reply":
        kept.append(w0)
    return sum(part.nbytes() for part in kept)


def drop_laziness(server: ServerState) -> ServerState:
    """The state without the mark that copies of a model take no memory."""
    return {k: Params(v) if isinstance(v, LazyModel) else v for k, v in server.items()}


def pick_rows(stack: RowStack, ids: Tensor, n: int) -> Params:
    """Rows of clients `ids`, sorted; a stack in memory is not copied if all `n` are asked for."""
    return stack if isinstance(stack, Params) and len(ids) == n else stack.rows(ids)


def check_newcomer_memory(server: ServerState) -> None:
    """Check that clients can join after training, for which all that the server keeps of others is in memory.

    Raises:
        ConfigError: it keeps too much.

    """
    stacks: list[DiskRows] = [part for part in map(_as_object, server.values()) if isinstance(part, DiskRows)]
    needed = sum(stack.n * stack.row_bytes for stack in stacks)
    if needed > NEWCOMER_MEMORY_BYTES:
        raise ConfigError(
            f"clients cannot join after training: the server keeps {needed / 2**30:.1f} GiB of the models of "
            f"{stacks[0].n:,} clients, expected at most {NEWCOMER_MEMORY_BYTES >> 30} GiB, as joining "
            "takes them into memory; "
            "leave held_out at 0, train fewer clients, or choose a method that keeps one model, such as fedavg_ft"
        )


def load_server_rows(server: ServerState) -> ServerState:
    """The server's state with all rows in memory.

    Raises:
        ConfigError: they are too many.

    """
    check_newcomer_memory(server)
    return {k: part if isinstance(part, Tensor) else load_rows(part) for k, part in server.items()}


def _as_object(part: object) -> object:
    """A part of the server's state, which may be a stack on disk although its type does not say so."""
    return part


def load_rows(stack: RowStack) -> Params:
    """All rows of a stack."""
    return stack if isinstance(stack, Params) else stack.rows(slice(None))
