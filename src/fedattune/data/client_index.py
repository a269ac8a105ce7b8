"""Index lists that say which client holds which samples, laid end to end.

A million clients cost no more memory than their indices: a `Client` is made only when somebody asks for it.
"""

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeVar, overload

import numpy as np

from ..core.errors import DataError
from .types import Array, Index

Part = Literal["train", "validation", "test"]
"""A part of a client's samples."""
PARTS: tuple[Part, ...] = ("train", "validation", "test")
CHUNK_SAMPLES = 1 << 20
"""Number of samples to look at together when going through all clients."""


@dataclass(frozen=True, eq=False)
class Client:
    """One client: its name, and the int64 indices of its samples by part."""

    name: str
    train: Index
    validation: Index
    test: Index

    @property
    def all(self) -> Index:
        """Indices of all three parts."""
        return np.concatenate([self.train, self.validation, self.test])


T_co = TypeVar("T_co", covariant=True)


class _MadeOnAccess(Sequence[T_co]):
    """A sequence whose items are made when somebody asks for them."""

    @abstractmethod
    def _make(self, i: int) -> T_co:
        """Make item i, from 0 on."""

    @overload
    def __getitem__(self, i: int) -> T_co: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, i: int | slice) -> T_co | tuple[T_co, ...]:
        numbers = range(len(self))[i]
        return tuple(map(self._make, numbers)) if isinstance(numbers, range) else self._make(numbers)


class RaggedIndex(_MadeOnAccess[Index]):
    """One index list per client: client i has `flat[bounds[i]:bounds[i + 1]]`, read as int64.

    Args:
        flat: all indices, (n,). They are kept in four bytes each where four bytes hold them.
        bounds: where each client's list begins, (N + 1,), from 0 to n.

    Raises:
        DataError: `bounds` do not go from 0 to n, or they fall.
    """

    def __init__(self, flat: Array, bounds: Array) -> None:
        flat, bounds = np.asarray(flat), np.asarray(bounds, dtype=np.int64)
        if bounds.ndim != 1 or not len(bounds) or bounds[0] != 0 or bounds[-1] != len(flat):
            raise DataError(f"index lists: bounds must go from 0 to {len(flat)}, the number of indices")
        if (np.diff(bounds) < 0).any():
            raise DataError("index lists: bounds must not fall")
        is_small = len(flat) == 0 or max(abs(int(flat.min())), abs(int(flat.max()))) < 2**31
        self.flat: Array = flat.astype(np.int32 if is_small else np.int64, copy=False)
        self.bounds = bounds

    @classmethod
    def from_lists(cls, lists: Sequence[Index]) -> "RaggedIndex":
        """Lay index lists end to end."""
        return cls(np.concatenate([np.empty(0, dtype=np.int64), *lists]), np.cumsum([0, *map(len, lists)]))

    def _make(self, i: int) -> Index:
        return self.flat[self.bounds[i] : self.bounds[i + 1]].astype(np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def sizes(self) -> Index:
        """Number of samples of each client, (N,)."""
        return np.diff(self.bounds)

    def take(self, clients: Index) -> "RaggedIndex":
        """Return the lists of some clients, in this order."""
        sizes = self.sizes[clients]
        bounds = np.concatenate([[0], sizes.cumsum()])
        starts = np.repeat(self.bounds[clients] - bounds[:-1], sizes)
        return RaggedIndex(self.flat[starts + np.arange(len(starts))], bounds)

    def client_numbers(self, start: int, stop: int) -> Index:
        """Return the client's number beside each sample of clients `start` to `stop`."""
        return np.repeat(np.arange(start, stop), np.diff(self.bounds[start : stop + 1]))

    def rows_between(self, start: int, stop: int) -> Array:
        """Return all samples of clients `start` to `stop`."""
        return self.flat[self.bounds[start] : self.bounds[stop]]


class DefaultNames(_MadeOnAccess[str]):
    """The names "0", "1", ... of n clients, each made when somebody asks for it."""

    def __init__(self, n: int) -> None:
        self._n = n

    def _make(self, i: int) -> str:
        return str(i)

    def __len__(self) -> int:
        return self._n


class ClientIndex(_MadeOnAccess[Client]):
    """All clients of a federation over flat index lists.

    Args:
        names: names of the clients, by default "0", "1", and so on.

    Raises:
        DataError: the parts and the names are of different numbers of clients.
    """

    def __init__(
        self, train: RaggedIndex, validation: RaggedIndex, test: RaggedIndex, names: Sequence[str] | None = None
    ) -> None:
        self.parts: dict[Part, RaggedIndex] = {"train": train, "validation": validation, "test": test}
        self.names: Sequence[str] = DefaultNames(len(train)) if names is None else tuple(names)
        counts = [len(self.names), *map(len, self.parts.values())]
        if len(set(counts)) > 1:
            raise DataError(
                f"clients: got {counts[0]} names and index lists for {counts[1]}, {counts[2]} and {counts[3]} "
                "clients (train, validation, test); expected the same number of each"
            )

    @classmethod
    def from_clients(cls, clients: Iterable[Client]) -> "ClientIndex":
        """Lay the index lists of clients end to end."""
        if isinstance(clients, ClientIndex):
            return clients
        members = list(clients)
        train, validation, test = (RaggedIndex.from_lists([getattr(one, part) for one in members]) for part in PARTS)
        return cls(train, validation, test, [client.name for client in members])

    def _make(self, i: int) -> Client:
        return Client(self.names[i], *(self.parts[part][i] for part in PARTS))

    def __len__(self) -> int:
        return len(self.names)

    def take(self, clients: Index) -> "ClientIndex":
        """Return some clients, in this order."""
        return self.change(lambda lists: lists.take(clients), [self.names[i] for i in clients.tolist()])

    def change(self, change: Callable[[RaggedIndex], RaggedIndex], names: Sequence[str] | None) -> "ClientIndex":
        """Return clients with other names, and with the index lists that `change` makes from each part's."""
        train, validation, test = (change(self.parts[part]) for part in PARTS)
        return ClientIndex(train, validation, test, names)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop) of clients with about `CHUNK_SAMPLES` samples each."""
        ends = sum((lists.bounds[1:] for lists in self.parts.values()), np.zeros(len(self), dtype=np.int64))
        start = 0
        while start < len(self):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + CHUNK_SAMPLES, side="right")))
            yield start, stop
            start = stop

    def check(self, where: str, n: int) -> None:
        """Check names and indices against `n` samples; `where` names the data in messages."""
        if not len(self):
            raise DataError(f"{where}: no clients; give at least one")
        if not isinstance(self.names, DefaultNames) and len(set(self.names)) < len(self):
            repeated = sorted(name for name, times in Counter(self.names).items() if times > 1)
            raise DataError(f"{where}: client names repeat: {', '.join(repeated)}; give each its own")
        for lists in self.parts.values():
            if len(lists.flat) and not 0 <= int(lists.flat.min()) <= int(lists.flat.max()) < n:
                outside = np.flatnonzero((lists.flat < 0) | (lists.flat >= n))[0]
                i = int(np.searchsorted(lists.bounds, outside, side="right")) - 1
                raise DataError(
                    f"{where}: client {self.names[i]!r} has indices outside [0, {n}); give indices of the {n} samples"
                )
        if self._first_with_repeats is not None:
            raise DataError(
                f"{where}: client {self.names[self._first_with_repeats]!r} holds a sample twice; give each of its "
                "samples once, to one part"
            )

    @cached_property
    def _first_with_repeats(self) -> int | None:
        """Number of the first client with a duplicate sample."""
        flats = [lists.flat for lists in self.parts.values()]
        n = max((int(flat.max()) + 1 for flat in flats if len(flat)), default=0)
        if sum(map(len, flats)) <= n:
            times = sum((np.bincount(flat, minlength=n) for flat in flats), np.zeros(n, dtype=np.int64))
            if times.max(initial=0) < 2:  # no two clients share a sample, as in most partitions
                return None
        for start, stop in self.chunks():
            chunk = (start, stop)
            keys = [(one.client_numbers(*chunk) << 32) + one.rows_between(*chunk) for one in self.parts.values()]
            joint = np.sort(np.concatenate(keys))
            if (same := np.flatnonzero(joint[1:] == joint[:-1])).size:
                return int(joint[same[0]] >> 32)
        return None


def hash_manifest(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its `hash`, in hexadecimal digits."""
    content = {key: value for key, value in body.items() if key != "hash"}
    return hashlib.sha256(_to_canonical_json(content).encode()).hexdigest()


def hash_clients(data: Mapping[str, Any], partition: Mapping[str, Any], clients: ClientIndex) -> str:
    """Return the `hash_manifest` of a manifest without making the manifest, which is larger than the data."""
    digest = hashlib.sha256(b'{"clients":[')
    for start, stop in clients.chunks():
        texts = []
        for part in sorted(PARTS):  # keys are sorted in canonical JSON
            lists = clients.parts[part]
            numbers = list(map(str, lists.rows_between(start, stop).tolist()))
            cuts = (lists.bounds[start : stop + 1] - lists.bounds[start]).tolist()
            texts.append([",".join(numbers[a:b]) for a, b in pairwise(cuts)])
        entries = (
            f'{{"name":{json.dumps(name)},"test":[{test}],"train":[{train}],"validation":[{validation}]}}'
            for name, test, train, validation in zip(clients.names[start:stop], *texts, strict=True)
        )
        digest.update(("," * (start > 0) + ",".join(entries)).encode())
    tail = f'],"data":{_to_canonical_json(data)},"partition":{_to_canonical_json(partition)}}}'
    digest.update(tail.encode())
    return digest.hexdigest()


def _to_canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
