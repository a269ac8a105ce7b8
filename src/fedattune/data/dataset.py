"""Labelled samples before they are divided among clients.

Samples gathered from where they are kept, and normalised on the way.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import DataError
from .schema import Schema
from .types import Array, Index

if TYPE_CHECKING:
    from .schema import Schema

Encoder = Callable[[list[Index], list[Index]], tuple[Array, list[Array]]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, their labels and, where they have one, their natural clients.

    The model's input is `(x - shift) * scale`. A table whose features are fitted on each client's own
    training part has `encode` instead: `encode(train, rows)` takes the training rows and all rows of each
    client and returns the features, float32 (n, F), and each client's constants (see `preparation`); `x` then only
    holds the raw values, NaN where missing.

    Raises:
        DataError: lengths that differ, values that are not finite, labels that are no class.

    """

    name: str
    x: Array  # (n, *shape), uint8 or float32
    y: Array  # (n,), int64
    classes: tuple[str, ...]
    shift: Array | None = None  # float32, broadcastable to x[0]
    scale: Array | None = None
    owner: Array | None = None  # (n,), int64: number of the natural client of each sample
    owners: tuple[str, ...] = ()
    encode: Encoder | None = None
    notes: tuple[str, ...] = ()  # sentences for the user
    allows_one_class: bool = False  # natural clients with one class are part of the definition (synthetic)
    known_fingerprint: str = ""  # the fingerprint of x and y, where reading them has found it
    schema: Schema | None = None  # of a table: its columns and categories

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.owner is not None and len(self.owner) != len(self.y)):
            owners = "" if self.owner is None else f", {len(self.owner)} owners"
            raise DataError(f"{self.name}: {len(self.x)} samples but {len(self.y)} labels{owners}")
        if len(self.y) == 0:
            raise DataError(f"{self.name}: no samples")
        _check_labels(self.name, self.y, len(self.classes))
        if self.owner is not None and not 0 <= self.owner.min() <= self.owner.max() < len(self.owners):
            raise DataError(f"{self.name}: owners must lie in [0, {len(self.owners)})")
        if self.encode is None:
            _check_features(self.name, self.x)
        for what, value in (("shift", self.shift), ("scale", self.scale)):
            _check_broadcast(self.name, what, value, self.x.shape[1:])

    @property
    def default_partition(self) -> str:
        """The partition used when none is asked for: natural clients where there are any."""
        return "dirichlet" if self.owner is None else "by_column"

    @property
    def default_clients(self) -> int:
        """Number of clients used when none is asked for: 20 for large image sets, else 10."""
        return 20 if self.x.ndim > 2 and len(self.x) >= 10_000 else 10

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of x and y, in hexadecimal digits."""
        return self.known_fingerprint or hash_arrays(self.x, self.y)


def hash_arrays(*arrays: Array) -> str:
    """SHA-256 of the arrays' types, shapes and bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _check_labels(name: str, y: Array, n_classes: int) -> None:
    if y.ndim != 1 or y.dtype != np.int64:
        raise DataError(f"{name}: labels must be int64 of shape (n,), got {y.dtype} of shape {y.shape}")
    wrong = np.flatnonzero((y < 0) | (y >= n_classes))
    if len(wrong):
        raise DataError(
            f"{name}: row {wrong[0]} has label {y[wrong[0]]}, but the {n_classes} classes are numbered from 0"
        )


def _check_features(name: str, x: Array) -> None:
    if x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{name}: samples must be uint8 or float32, got {x.dtype}")
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(f"{name}: samples must have the shape (n, features...), got {x.shape}")
    if x.dtype == np.uint8:
        return
    # a finite sum proves all values finite without a temporary array; float64 cannot overflow here
    with np.errstate(invalid="ignore"):  # inf - inf
        total = x.sum(dtype=np.float64)
    if not np.isfinite(total):
        row = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))[0])
        raise DataError(f"{name}: row {row} holds NaN or an infinite value; mend or leave out such rows")


def _check_broadcast(name: str, what: str, value: Array | None, shape: tuple[int, ...]) -> None:
    if value is None:
        return
    try:
        fits = np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise DataError(f"{name}: {what} of shape {value.shape} does not fit samples of shape {shape}")
