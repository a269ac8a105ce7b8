"""Data divided among clients, each with its own training, validation and test part."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from ..errors import ConfigError, DataError, did_you_mean
from .dataset import Array, Index, fingerprint

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


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
    clients: tuple[Client, ...]
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)  # name, options, clients, seed, fractions
    notes: tuple[str, ...] = ()
    source: str = ""  # fingerprint of the data before features were fitted per client; empty: that of x, y

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError(f"{self.name}: no clients")
        repeated = sorted(name for name, times in Counter(self.names).items() if times > 1)
        if repeated:
            raise DataError(f"{self.name}: client names repeat: {', '.join(repeated)}; give each its own")
        for client in self.clients:
            rows = client.all
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(self.y):
                raise DataError(f"{self.name}: client {client.name!r} has indices outside [0, {len(self.y)})")
            if len(np.unique(rows)) < len(rows):
                raise DataError(f"{self.name}: client {client.name!r} holds a sample twice")

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
    def names(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(client.name for client in self.clients)

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.x.device

    def part(self, part: Part) -> list[Index]:
        """Each client's indices of one part."""
        if part not in PARTS:
            raise ConfigError(f"unknown part {part!r}; {did_you_mean(part, PARTS)}")
        return [getattr(client, part) for client in self.clients]

    def sizes(self, part: Part) -> torch.Tensor:
        """Each client's number of samples in one part, int64 (N,)."""
        return torch.tensor([len(rows) for rows in self.part(part)], dtype=torch.int64)

    def label_counts(self, part: Part | None = None) -> Array:
        """How many samples of each class each client has, in one part or in all, int64 (N, classes)."""
        y = self.y.cpu().numpy()
        parts = [client.all for client in self.clients] if part is None else self.part(part)
        return np.stack([np.bincount(y[rows], minlength=self.n_classes) for rows in parts])

    def features(self, index: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The model's input for the samples `index`, of any shape: (*index.shape, *input_shape)."""
        x = self.x.index_select(0, index.reshape(-1)).to(dtype)
        if self.shift is not None:
            x.sub_(self.shift.to(dtype))
        if self.scale is not None:
            x.mul_(self.scale.to(dtype))
        return x.reshape(*index.shape, *self.input_shape)

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
        body = {
            "data": {
                "name": self.name,
                "n": len(self.y),
                "fingerprint": self.source or fingerprint(self.x.cpu().numpy(), self.y.cpu().numpy()),
            },
            "partition": dict(self.partition),
            "clients": [
                {"name": client.name, **{part: getattr(client, part).tolist() for part in PARTS}}
                for client in self.clients
            ],
        }
        return {"hash": manifest_hash(body), **body}

    def heterogeneity(self) -> dict[str, float]:
        """How unlike the clients are: their sizes, their classes, and how far apart their labels are.

        `label_distance` is the mean total variation distance between a client's label distribution and that
        of all samples (0: all alike, towards 1: nothing in common); `label_distance_pairs` is that of two
        clients.
        """
        from sklearn.metrics import pairwise_distances

        counts = self.label_counts()
        sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
        shares = counts / np.maximum(sizes, 1)[:, None]
        pooled = counts.sum(axis=0) / max(int(sizes.sum()), 1)
        n = len(counts)
        pairs = pairwise_distances(shares, metric="manhattan").sum() / 2 / max(n * (n - 1), 1)
        return {
            "clients": n,
            **{f"samples_{k}": v for k, v in _spread(sizes).items()},
            **{f"classes_{k}": v for k, v in _spread(held).items()},
            "label_distance": float(np.abs(shares - pooled).sum(axis=1).mean() / 2),
            "label_distance_pairs": float(pairs),
        }


def manifest_hash(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its `hash`, in hexadecimal digits."""
    rest = {key: value for key, value in body.items() if key != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _spread(values: Array) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}
