"""Data divided among clients, each with its own training, validation and test part.

What a server knows of clients whose data it never sees.

The part of a federation that is at one place: samples of some clients, under the numbers that all know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, did_you_mean
from .client_index import PARTS, Client, ClientIndex, Part, RaggedIndex, hash_clients
from .dataset import Dataset, hash_arrays
from .schema import Schema, make_schema
from .types import Array


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All samples, kept once, and the clients as index lists into them.

    N clients; `x` is (n, *shape), uint8 or float32; the model's input is `(x - shift) * scale`.

    Raises:
        DataError: no clients, names that repeat, indices out of range, or a sample in two parts of a client.

    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    classes: tuple[str, ...]
    clients: Sequence[Client]  # kept as `ClientIndex`, over flat index lists
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)  # name, options, clients, seed, fractions
    notes: tuple[str, ...] = ()
    source: str = ""  # fingerprint of the data before features were fitted per client; empty: that of x, y
    schema: Schema | None = None  # of a table: its columns and categories
    preparation: Mapping[str, Array] = field(
        default_factory=dict
    )  # of a table: each client's constants, by name

    def __post_init__(self) -> None:
        held = ClientIndex.from_clients(self.clients)
        held.check(self.name, len(self.y))
        object.__setattr__(self, "clients", held)

    @property
    def index(self) -> ClientIndex:
        """The clients as index lists."""
        return cast(ClientIndex, self.clients)

    def __repr__(self) -> str:
        return f"Federation({self.name!r}, {self.n_clients} clients, {len(self.y)} samples, {self.n_classes} classes)"

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.clients)

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def names(self) -> Sequence[str]:
        """The clients' names."""
        return self.index.names

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.x.device

    def part(self, part: Part) -> RaggedIndex:
        """Each client's indices of one part."""
        if part not in PARTS:
            raise ConfigError(f"unknown part {part!r}; {did_you_mean(part, PARTS)}")
        return self.index.parts[part]

    def sizes(self, part: Part) -> torch.Tensor:
        """Each client's number of samples in one part, int64 (N,); not to be written to."""
        lists = self.part(part)
        if part not in self._sizes:
            self._sizes[part] = torch.from_numpy(lists.sizes)
        return self._sizes[part]

    @cached_property
    def _sizes(self) -> dict[str, torch.Tensor]:
        return {}

    def label_counts(self, part: Part | None = None) -> Array:
        """How many samples of each class each client has, in one part or in all, int64 (N, classes)."""
        y, k = self.y.cpu().numpy(), self.n_classes
        parts = [self.part(p) for p in PARTS] if part is None else [self.part(part)]
        counts = np.zeros((self.n_clients, k), dtype=np.int64)
        for start, stop in self.index.chunks():
            for lists in parts:
                cells = (lists.client_numbers(start, stop) - start) * k + y[lists.rows_between(start, stop)]
                counts[start:stop] += np.bincount(cells, minlength=(stop - start) * k).reshape(-1, k)
        return counts

    def features(self, index: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The model's input for the samples `index`, of any shape: (*index.shape, *input_shape)."""
        x, shift, scale = self.samples(dtype)
        return gather(x, index, shift, scale, dtype)

    def samples(
        self, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """All samples as they are kept, and what is subtracted from them and multiplied with, in `dtype`."""
        shift, scale = (None if a is None else a.to(dtype) for a in (self.shift, self.scale))
        return self.x, shift, scale

    def to(self, device: torch.device | str) -> "Federation":
        """The same federation with its samples on `device`."""
        if self.x.device == torch.device(device):
            return self
        moved = {
            name: None if tensor is None else tensor.to(device)
            for name, tensor in (("x", self.x), ("y", self.y), ("shift", self.shift), ("scale", self.scale))
        }
        return replace(self, **cast(dict[str, Any], moved))

    def manifest(self) -> dict[str, Any]:
        """Which client has which samples, as it is saved in JSON; `hash` covers all the rest."""
        return {
            "hash": self.digest,
            "data": self._about,
            "partition": dict(self.partition),
            "clients": [
                {"name": client.name, **{part: getattr(client, part).tolist() for part in PARTS}}
                for client in self.clients
            ],
        }

    @cached_property
    def digest(self) -> str:
        """The `hash` of the manifest, made without the whole of it: that of many clients is large."""
        return hash_clients(self._about, dict(self.partition), self.index)

    @cached_property
    def _about(self) -> dict[str, Any]:
        made_of = self.source or hash_arrays(self.x.cpu().numpy(), self.y.cpu().numpy())
        return {"name": self.name, "n": len(self.y), "fingerprint": made_of}

    def heterogeneity(self) -> dict[str, float]:
        """How unlike the clients are: their sizes, their classes, and how far apart their labels are.

        `label_distance` is the mean total variation distance between a client's label distribution and that
        of all samples (0: all alike, towards 1: nothing in common); `label_distance_pairs` is that of two
        clients.
        """
        counts = self.label_counts()
        sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
        shares = counts / np.maximum(sizes, 1)[:, None]
        pooled = counts.sum(axis=0) / max(int(sizes.sum()), 1)
        n = len(counts)
        # Of sorted values, each is subtracted as often as others are above it: no N x N distances are needed.
        ranks = 2 * np.arange(n) - n + 1
        pairs = float(ranks @ np.sort(shares, axis=0).sum(axis=1)) / max(n * (n - 1), 1)
        return {
            "clients": n,
            **{f"samples_{k}": v for k, v in _summarise(sizes).items()},
            **{f"classes_{k}": v for k, v in _summarise(held).items()},
            "label_distance": float(np.abs(shares - pooled).sum(axis=1).mean() / 2),
            "label_distance_pairs": max(0.0, pairs),
        }


def _summarise(values: Array) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def infer_schema(data: Dataset | Federation) -> Schema:
    """Return the schema of data at hand: of a table its columns, else the shape, the classes and the scaling.

    Raises:
        ConfigError: two classes have one name, or there is a single class.

    """
    if data.schema is not None:
        return data.schema
    constants = {key: getattr(data, key) for key in ("shift", "scale")}
    scaling = {key: value.tolist() for key, value in constants.items() if value is not None}
    values = {"classes": data.classes, "input_shape": tuple(data.x.shape[1:]), **scaling}
    return make_schema(values, f"the schema of {data.name}")


@dataclass(frozen=True)
class FederationInfo:
    """The clients of a real federation: their names and numbers of samples, and what a model for them is like.

    It stands in for a `Federation` where no data are looked at. `counts` are (N, 3), in the order of `PARTS`.
    """

    name: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    partition: Mapping[str, Any] = field(default_factory=lambda: {"name": "given"})

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.names)

    def sizes(self, part: Part) -> torch.Tensor:
        """Each client's number of samples in one part, int64 (N,)."""
        place = PARTS.index(part)
        return torch.tensor([row[place] for row in self.counts], dtype=torch.int64)

    def to(self, device: torch.device | str) -> "FederationInfo":
        """Itself: there is nothing to move."""
        return self


def gather(
    x: Tensor, index: Tensor, shift: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x - shift) * scale of the samples `index`, of any shape: (*index.shape, *sample); can be scripted."""
    found = x.index_select(0, index.reshape(-1)).to(dtype)
    if shift is not None:
        found.sub_(shift)
    if scale is not None:
        found.mul_(scale)
    return found.view(index.size() + x.size()[1:])
