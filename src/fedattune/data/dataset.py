"""Labelled samples before they are divided among clients."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import DataError, list_some
from ..core.targets import IGNORED, TargetKind, find_info_kind, find_kind
from .schema import Schema, fits
from .types import Array, Index, Scaling, TargetScale


@dataclass(frozen=True)
class Times:
    """The age of samples."""

    column: str  # the column of a table that says it
    values: Array  # days since 1970, or other numbers that grow with time, float64 (n,); NaN where missing
    are_dates: bool

    def show(self, value: float) -> str:
        """Write a time for people."""
        return str(np.datetime64(int(np.floor(value)), "D")) if self.are_dates else f"{value:g}"


MAX_LISTED = 5
"""Labels or numbers that a note lists."""
Encoder = Callable[[list[Index], list[Index], Scaling], tuple[Array, list[Array], Array]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, their labels and, where they have any, their natural clients.

    The model's input is `(x - shift) * scale`. A table's features are fitted on each client's own training part, so a
    table has `encode` instead, and `x` holds the raw values, NaN where missing.

    Args:
        name: name of the data.
        x: samples (n, *shape), uint8, int64 (such as token numbers) or float32.
        y: class numbers (n,), int64; or, if the target is a number, its values (n,), float32, in their unit; or L
            labels (n, L), bool, M numbers (n, M), float32, or class numbers of positions (n, *positions), int64.
        classes: names of the classes; empty for labels and numbers.
        shift: subtracted from the samples, float32, broadcastable to one sample.
        scale: multiplied with the shifted samples, likewise.
        owner: number of each sample's natural client, (n,), int64.
        owners: names of the natural clients.
        groups: group of each sample, such as the patient of a visit, (n,), int64; a group is in one part as a whole.
        found_groups: column of a table that gives the groups because it looks so, not because the user named it.
        encode: takes the training rows and all rows of each client, and the scaling; returns features, float32
            (n, F), each client's constants (3, K), and which deviations it took from all clients, bool (N, K).
        read_times: of a table, reads the column of their age; None stands for the only date column.
        notes: sentences for the user.
        known_fingerprint: fingerprint of x and y, where reading them has found it.
        schema: columns and categories of a table.
        labels: names of the labels of a target that has several.
        outputs: names of the numbers of a target that has several.

    Raises:
        DataError: lengths differ, values are not finite, or a label is no class.
    """

    name: str
    x: Array
    y: Array
    classes: tuple[str, ...]
    shift: Array | None = None
    scale: Array | None = None
    owner: Array | None = None
    owners: tuple[str, ...] = ()
    groups: Array | None = None
    found_groups: str | None = None
    encode: Encoder | None = None
    read_times: Callable[[str | None], Times] | None = None
    notes: tuple[str, ...] = ()
    known_fingerprint: str = ""
    schema: Schema | None = None
    labels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.owner is not None and len(self.owner) != len(self.y)):
            labels = f"{len(self.y)} labels" + ("" if self.owner is None else f", {len(self.owner)} owners")
            raise DataError(f"{self.name}: {len(self.x)} samples but {labels}; give one of each per sample")
        if self.groups is not None and (self.groups.shape != self.y.shape[:1] or self.groups.dtype != np.int64):
            got = f"{self.groups.dtype} of shape {self.groups.shape}"
            raise DataError(f"{self.name}: groups must be int64 of shape ({len(self.y)},), one per sample, got {got}")
        if len(self.y) == 0:
            raise DataError(f"{self.name}: no samples; give at least one")
        self._check_target()
        if self.owner is not None and not 0 <= self.owner.min() <= self.owner.max() < len(self.owners):
            raise DataError(f"{self.name}: owners must lie in [0, {len(self.owners)})")
        if self.encode is None:
            _check_features(self.name, self.x)
        for what, value in (("shift", self.shift), ("scale", self.scale)):
            if value is not None and not fits(value, shape := self.x.shape[1:]):
                raise DataError(f"{self.name}: {what} of shape {value.shape} does not fit samples of shape {shape}")

    def _check_target(self) -> None:
        kind, y, n_classes = find_info_kind(self.classes, self.labels, self.outputs), self.y, len(self.classes)
        if kind in ("labels", "numbers"):
            names, dtype = (self.labels, "bool") if kind == "labels" else (self.outputs, "float32")
            if y.shape != (len(y), len(names)) or y.dtype != dtype:
                got = f"{y.dtype} of shape {y.shape}"
                raise DataError(f"{self.name}: targets must be {dtype} of shape (n, {len(names)}), got {got}")
        elif y.dtype != ("int64" if n_classes else "float32") or (y.ndim > 1 and not n_classes):
            what, wanted = ("labels", "int64") if n_classes else ("without classes, targets", "float32")
            raise DataError(f"{self.name}: {what} must be {wanted} of shape (n,), got {y.dtype} of shape {y.shape}")
        wrong = np.argwhere(_find_wrong(y, n_classes))
        if len(wrong):
            row, value = wrong[0][0], y[tuple(wrong[0])]
            if n_classes:
                raise DataError(
                    f"{self.name}: row {row} has label {value}, but the {n_classes} classes are numbered from 0"
                )
            raise DataError(f"{self.name}: row {row} has the target {value}, which is no finite number")

    @property
    def kind(self) -> TargetKind:
        """Kind of the target; see `find_kind`."""
        return find_kind(self.y)

    @property
    def default_partition(self) -> str:
        """The partition to use by default: the natural clients where there are any."""
        if self.owner is not None:
            return "by_column"
        return "dirichlet" if self.kind == "class" else "iid"

    @property
    def default_clients(self) -> int:
        """The number of clients to use by default: 20 for large image sets, else 10."""
        return 20 if self.x.ndim > 2 and len(self.x) >= 10_000 else 10

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of x and y, in hexadecimal digits."""
        return self.known_fingerprint or hash_arrays(self.x, self.y)


def scale_target(y: Array, train: Sequence[Index]) -> tuple[Array, TargetScale]:
    """Scale targets (n,) by mean and deviation of the training rows, and return both; each of M numbers (n, M) alone.

    They come from what clients share: count, sum and sum of squares.
    """
    if y.ndim > 1:
        each = [scale_target(column, train) for column in y.T]
        means, deviations = zip(*(scale for _, scale in each), strict=True)
        return np.stack([column for column, _ in each], axis=1), TargetScale(means, deviations)
    sums = np.array([(len(rows), y[rows].sum(dtype=np.float64)) for rows in train])
    mean = float(sums[:, 1].sum() / sums[:, 0].sum())
    squares = sum(float(((y[rows].astype(np.float64) - mean) ** 2).sum()) for rows in train)
    scale = TargetScale(mean, float(np.sqrt(squares / sums[:, 0].sum())) or 1.0)
    return ((y - scale.mean) / scale.deviation).astype(np.float32), scale


TARGET_NOTE = (
    "The target is a number: models learn it in deviations from its mean over all training rows, for which clients "
    "share count, sum and sum of squares; results are in its unit."
)
SEVERAL_NUMBERS_NOTE = (
    "The target is {n} numbers ({names}): models learn each in deviations from its mean over all training rows, for "
    "which clients share count, sum and sum of squares; RMSE and MAE are in these deviations, as units differ."
)
LABELS_NOTE = "The target is {n} labels, each true or false: {names}; a row counts by the share of its right labels."


def describe_target_kind(dataset: Dataset) -> tuple[str, ...]:
    """Say what is predicted, if it is not one class or given positions."""
    if dataset.kind == "number":
        return (TARGET_NOTE,)
    if dataset.kind in ("labels", "numbers"):
        names = dataset.labels or dataset.outputs
        note = LABELS_NOTE if dataset.labels else SEVERAL_NUMBERS_NOTE
        return (note.format(n=len(names), names=list_some(names, MAX_LISTED)),)
    return ()


def hash_arrays(*arrays: Array) -> str:
    """Return the SHA-256 of the arrays' types, shapes and bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _find_wrong(y: Array, n_classes: int) -> Array:
    """Mark the values of y that are no class, or no finite number; a position may be ignored."""
    if y.dtype == np.bool_:
        return np.zeros_like(y)
    if not n_classes:
        return ~np.isfinite(y)
    is_ignored = (y == IGNORED) & (y.ndim > 1)
    return np.asarray(((y < 0) & ~is_ignored) | (y >= n_classes))


def _check_features(name: str, x: Array) -> None:
    if x.dtype not in (np.uint8, np.int64, np.float32):
        raise DataError(f"{name}: samples must be uint8, int64 or float32, got {x.dtype}")
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(f"{name}: samples must have the shape (n, features...), got {x.shape}")
    if (row := find_nonfinite_row(x)) is not None:
        raise DataError(f"{name}: row {row} holds NaN or an infinite value; correct or leave out such rows")


def find_nonfinite_row(x: Array) -> int | None:
    """Find the first row of x with NaN or an infinite value; None if there is none."""
    # A finite sum proves all values finite without a temporary array; float64 cannot overflow here.
    with np.errstate(invalid="ignore"):  # inf - inf
        if x.dtype.kind != "f" or np.isfinite(x.sum(dtype=np.float64)):
            return None
    return int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))[0])
