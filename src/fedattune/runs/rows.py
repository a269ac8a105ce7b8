"""Stacks of client rows on disk: read and written only for the clients that are asked for."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..params import Params
from .slots import Slots

STRETCH = 1 << 26
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
        self._file = Slots(first, n, path)
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
        return iter(torch.split(ids, max(1, STRETCH // max(1, self.row_bytes))))

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


def rows_file(folder: Path | None, name: str) -> Path | None:
    """The file of a stack that the checkpoint calls `name`."""
    return folder / f"{name.replace('/', '.')}.rows" if folder else None
