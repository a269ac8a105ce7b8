"""Who holds which samples: index lists laid end to end, so that a million clients cost no more than their indices.

The hash of a manifest, without making the manifest: that of a million clients is larger than all their data.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np

from ..core.errors import DataError
from .types import Array, Index

Part = Literal["train", "validation", "test"]
"""A part of a client's samples."""


PARTS: tuple[Part, ...] = ("train", "validation", "test")


CHUNK_SAMPLES = 1 << 20
"""Samples that are looked at together where all clients are gone through."""


@dataclass(frozen=True, eq=False)
class Client:
    """One client: its name and which samples it holds, as int64 indices."""

    name: str
    train: Index
    validation: Index
    test: Index

    @property
    def all(self) -> Index:
        """The indices of all three parts."""
        return np.concatenate([self.train, self.validation, self.test])


class RaggedIndex(Sequence[Index]):
    """One index list per client: that of client i is `flat[bounds[i]:bounds[i + 1]]`, read as int64.

    `bounds` (N + 1,) begins with 0 and ends with the length of `flat`. Indices are kept in four bytes each.

    Raises:
        DataError: `bounds` are none.

    """

    def __init__(self, flat: Array, bounds: Array) -> None:
        flat, bounds = np.asarray(flat), np.asarray(bounds, dtype=np.int64)
        if bounds.ndim != 1 or not len(bounds) or bounds[0] != 0 or bounds[-1] != len(flat):
            raise DataError(f"index lists: bounds must go from 0 to {len(flat)}, the number of indices")
        if (np.diff(bounds) < 0).any():
            raise DataError("index lists: bounds must not fall")
        self.flat = _narrow_indices(flat)
        self.bounds = bounds

    @classmethod
    def from_lists(cls, lists: Iterable[Index]) -> "RaggedIndex":
        """The same lists, laid end to end."""
        growing = _RaggedBuilder()
        for rows in lists:
            growing.add(rows)
        return growing.done()

    @overload
    def __getitem__(self, i: int) -> Index: ...
    @overload
    def __getitem__(self, i: slice) -> list[Index]: ...
    def __getitem__(self, i: int | slice) -> Index | list[Index]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        return self.flat[self.bounds[i] : self.bounds[i + 1]].astype(np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def sizes(self) -> Index:
        """Samples of each client, (N,)."""
        return np.diff(self.bounds)

    def take(self, clients: Index) -> "RaggedIndex":
        """The lists of some clients, in this order."""
        sizes = self.sizes[clients]
        bounds = np.concatenate([[0], sizes.cumsum()])
        starts = np.repeat(self.bounds[clients] - bounds[:-1], sizes)
        return RaggedIndex(self.flat[starts + np.arange(len(starts))], bounds)

    def client_numbers(self, start: int, stop: int) -> Index:
        """The client's number beside each sample of clients `start` to `stop`."""
        return np.repeat(np.arange(start, stop), np.diff(self.bounds[start : stop + 1]))

    def rows_between(self, start: int, stop: int) -> Array:
        """All samples of clients `start` to `stop`."""
        return self.flat[self.bounds[start] : self.bounds[stop]]


def _narrow_indices(flat: Array) -> Array:
    """The indices in four bytes each, if these hold them."""
    fits = len(flat) == 0 or max(abs(int(flat.min())), abs(int(flat.max()))) < 2**31
    return flat.astype(np.int32 if fits else np.int64, copy=False)


class _RaggedBuilder:
    """Index lists that come one by one."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._waiting: list[Index] = []
        self._sizes: list[int] = []

    def add(self, rows: Index) -> None:
        self._waiting.append(np.asarray(rows))
        self._sizes.append(len(rows))
        if len(self._waiting) == 10_000:
            self._join()

    def _join(self) -> None:
        if self._waiting:
            self._blocks.append(_narrow_indices(np.concatenate(self._waiting)))
            self._waiting = []

    def done(self) -> RaggedIndex:
        self._join()
        flat = np.concatenate(self._blocks) if self._blocks else np.empty(0, dtype=np.int32)
        return RaggedIndex(flat, np.cumsum([0, *self._sizes]))


class DefaultNames(Sequence[str]):
    """The names "0", "1", ... of n clients, made when they are asked for."""

    def __init__(self, n: int) -> None:
        self._range = range(n)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[str, ...]: ...
    def __getitem__(self, i: int | slice) -> str | tuple[str, ...]:
        return tuple(map(str, self._range[i])) if isinstance(i, slice) else str(self._range[i])

    def __len__(self) -> int:
        return len(self._range)


class ClientIndex(Sequence[Client]):
    """All clients of a federation over flat index lists; a `Client` is made when it is asked for.

    Without `names`, clients are called "0", "1", and so on.

    Raises:
        DataError: the parts and names are not of equally many clients.

    """

    def __init__(
        self,
        train: RaggedIndex,
        validation: RaggedIndex,
        test: RaggedIndex,
        names: Sequence[str] | None = None,
    ) -> None:
        self.parts: dict[Part, RaggedIndex] = {"train": train, "validation": validation, "test": test}
        self.names: Sequence[str] = DefaultNames(len(train)) if names is None else tuple(names)
        counts = [len(self.names), *map(len, self.parts.values())]
        if len(set(counts)) > 1:
            raise DataError(
                f"clients: got {counts[0]} names and index lists for {counts[1]}, {counts[2]} and {counts[3]} "
                "clients (train, validation, test); expected as many of each"
            )

    @classmethod
    def from_clients(cls, clients: Iterable[Client]) -> "ClientIndex":
        """The same clients, their index lists laid end to end."""
        if isinstance(clients, ClientIndex):
            return clients
        names, growing = [], {part: _RaggedBuilder() for part in PARTS}
        for client in clients:
            names.append(client.name)
            for part in PARTS:
                growing[part].add(getattr(client, part))
        return cls(**{part: lists.done() for part, lists in growing.items()}, names=names)

    @overload
    def __getitem__(self, i: int) -> Client: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Client, ...]: ...
    def __getitem__(self, i: int | slice) -> Client | tuple[Client, ...]:
        if isinstance(i, slice):
            return tuple(self[k] for k in range(*i.indices(len(self))))
        return Client(self.names[i], *(self.parts[part][i] for part in PARTS))

    def __len__(self) -> int:
        return len(self.names)

    def take(self, clients: Index) -> "ClientIndex":
        """Some clients, in this order."""
        names = [self.names[i] for i in clients.tolist()]
        return ClientIndex(**{part: lists.take(clients) for part, lists in self.parts.items()}, names=names)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Stretches (start, stop) of clients, each with about as many samples as may be looked at together."""
        ends = sum((lists.bounds[1:] for lists in self.parts.values()), np.zeros(len(self), dtype=np.int64))
        start = 0
        while start < len(self):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + CHUNK_SAMPLES, side="right")))
            yield start, stop
            start = stop

    def check(self, where: str, n: int) -> None:
        """Check names and indices against `n` samples.

        Raises:
            DataError: no clients, names that repeat, indices out of range, or a sample twice on one client.

        """
        if not len(self):
            raise DataError(f"{where}: no clients")
        if not isinstance(self.names, DefaultNames) and len(set(self.names)) < len(self):
            repeated = sorted(name for name, times in Counter(self.names).items() if times > 1)
            raise DataError(f"{where}: client names repeat: {', '.join(repeated)}; give each its own")
        for lists in self.parts.values():
            if len(lists.flat) and not 0 <= int(lists.flat.min()) <= int(lists.flat.max()) < n:
                outside = np.flatnonzero((lists.flat < 0) | (lists.flat >= n))[0]
                i = int(np.searchsorted(lists.bounds, outside, side="right")) - 1
                raise DataError(f"{where}: client {self.names[i]!r} has indices outside [0, {n})")
        if self._twice is not None:
            raise DataError(f"{where}: client {self.names[self._twice]!r} holds a sample twice")

    @cached_property
    def _twice(self) -> int | None:
        """The first client that holds a sample twice."""
        flats = [lists.flat for lists in self.parts.values()]
        n = max((int(flat.max()) + 1 for flat in flats if len(flat)), default=0)
        if sum(map(len, flats)) <= n:
            times = sum((np.bincount(flat, minlength=n) for flat in flats), np.zeros(n, dtype=np.int64))
            if times.max(initial=0) < 2:  # no two clients share a sample, as in most partitions
                return None
        for start, stop in self.chunks():
            keys = [
                (lists.client_numbers(start, stop) << 32) + lists.rows_between(start, stop)
                for lists in self.parts.values()
            ]
            joint = np.sort(np.concatenate(keys))
            if (same := np.flatnonzero(joint[1:] == joint[:-1])).size:
                return int(joint[same[0]] >> 32)
        return None


def hash_manifest(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its `hash`, in hexadecimal digits."""
    return hashlib.sha256(
        _canonical_json({key: value for key, value in body.items() if key != "hash"})
    ).hexdigest()


def hash_clients(data: Mapping[str, Any], partition: Mapping[str, Any], clients: ClientIndex) -> str:
    """`hash_manifest` of the manifest with these entries."""
    found = hashlib.sha256(b'{"clients":[')
    parts = sorted(PARTS)
    decimals = _DecimalTexts(1 + max(int(lists.flat.max(initial=-1)) for lists in clients.parts.values()))
    entry = b'{"name":%b,' + b",".join(b'"%b":[%%b]' % part.encode() for part in parts) + b"}"
    for start, stop in clients.chunks():
        texts = []
        for part in parts:
            lists = clients.parts[part]
            text, begins = decimals.join(lists.rows_between(start, stop))
            cuts = begins[lists.bounds[start : stop + 1] - lists.bounds[start]]
            # What stands between two cuts ends with a comma, unless it is nothing.
            ends = np.maximum(cuts[:-1], cuts[1:] - 1)
            texts.append([text[a:b] for a, b in zip(cuts.tolist(), ends.tolist(), strict=False)])
        names = [json.dumps(name).encode() for name in clients.names[start:stop]]
        entries = map(entry.__mod__, zip(names, *texts, strict=True))
        found.update((b"," if start else b"") + b",".join(entries))
    found.update(b'],"data":' + _canonical_json(data) + b',"partition":' + _canonical_json(partition) + b"}")
    return found.hexdigest()


def iter_manifest_json(head: Mapping[str, Any], clients: ClientIndex) -> Iterator[str]:
    """The JSON of a manifest of `clients` piece by piece; `head` is all of it but them."""
    yield json.dumps(dict(head)).removesuffix("}") + ', "clients": ['
    for i, client in enumerate(clients):
        lists: dict[str, list[int]] = {part: getattr(client, part).tolist() for part in PARTS}
        yield ", " * (i > 0) + json.dumps({"name": client.name, **lists})
    yield "]}"


class _DecimalTexts:
    """The numbers 0 to n - 1 as text, a comma after each."""

    def __init__(self, n: int) -> None:
        width = len(str(max(0, n - 1)))
        numbers = np.arange(n)
        self._cells = np.full((n, width + 1), ord(","), dtype=np.uint8)
        self._real = np.ones((n, width + 1), dtype=bool)
        for column in range(width):
            place = 10 ** (width - 1 - column)
            self._cells[:, column] = numbers // place % 10 + ord("0")
            self._real[:, column] = (numbers >= place) | (place == 1)
        self._lengths = self._real.sum(1)

    def join(self, values: Array) -> tuple[bytes, Index]:
        """The text of some numbers, and where each begins (m + 1,), the last being the end."""
        text = self._cells.take(values, 0)[self._real.take(values, 0)].tobytes()
        return text, np.concatenate([[0], self._lengths.take(values).cumsum()])


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
