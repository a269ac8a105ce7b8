"""Targets of several parts from arrays: labels, numbers, or the classes of positions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.errors import ConfigError, DataError
from ..core.targets import IGNORED, TargetKind
from .tables.checks import MAX_ABS_VALUE, MAX_NUMBER_CLASSES, TargetType
from .types import Array

MAX_UNUSED_CLASSES = 50
"""Classes per different label above which labels are no numbers of classes, but years, say."""


class Encoded(NamedTuple):
    """Targets as a data set keeps them, and the names of their classes, labels or numbers; notes say what was taken."""

    y: Array
    classes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: Sequence[str] = ()


def encode_several(
    owners: Sequence[str],
    ys: Sequence[Array],
    classes: Sequence[str] | None,
    targets: Sequence[str] | None,
    target_type: TargetType,
) -> Encoded:
    """Encode targets (n_i, parts) or (n_i, *positions) of each client; `owners` names the clients in messages."""
    first = ys[0]
    for owner, y in zip(owners, ys, strict=True):
        if y.shape[1:] != first.shape[1:]:
            raise DataError(
                f"client {owner!r} has targets of shape {y.shape[1:]}, client {owners[0]!r} {first.shape[1:]}; all "
                "clients need the same"
            )
        if y.dtype.kind not in "buif":
            raise DataError(f"client {owner!r}: targets of several parts must be true/false or numbers, got {y.dtype}")
    joint = np.concatenate(ys)
    kind, notes = _choose_kind(joint, classes, target_type)
    if kind == "positions":
        if targets is not None:
            raise ConfigError("targets name labels or numbers, and y has a class for each position; give classes")
        return _encode_positions(owners, ys, joint, classes, notes)
    if joint.ndim > 2:
        raise DataError(
            f"y must have the shape (n, {kind}) for several {kind}, got {joint.shape}; for a class of each position, "
            "give target_type='class'"
        )
    if classes is not None:
        raise ConfigError(f"y has several {kind}, which are no classes; give their names as targets=[...]")
    names = tuple(map(str, range(joint.shape[1]) if targets is None else targets))
    if len(names) != joint.shape[1] or len(set(names)) < len(names):
        raise ConfigError(f"targets: got {len(names)} names for {joint.shape[1]} {kind}; give each one its own name")
    if kind == "labels":
        return Encoded(_read_labels(owners, ys, names), labels=names, notes=notes)
    return Encoded(read_numbers(owners, ys, names), outputs=names, notes=notes)


def _choose_kind(y: Array, classes: Sequence[str] | None, target_type: TargetType) -> tuple[TargetKind, Sequence[str]]:
    """Tell what targets (n, ...) are, and say so where zeros and ones could be something else."""
    if target_type != "auto":
        chosen: dict[str, TargetKind] = {"label": "labels", "number": "numbers", "class": "positions"}
        return chosen[target_type], ()
    if y.dtype.kind == "b":
        return "labels", ()
    if classes is None and y.ndim == 2 and ((y == 0) | (y == 1)).all():
        other = "number" if y.dtype.kind == "f" else "class"
        return "labels", [
            f"The targets are {y.shape[1]} columns of zeros and ones and taken as labels; to predict "
            + ("numbers" if other == "number" else "a class for each position")
            + f", give target_type={other!r}."
        ]
    if y.dtype.kind == "f":
        return "numbers", ()
    if classes is None and y.ndim == 2 and len(np.unique(y)) > MAX_NUMBER_CLASSES:
        return "positions", [
            f"The targets are {y.shape[1]} columns of whole numbers ({y.min()} to {y.max()}) and taken as a class for "
            "each position; to predict numbers, give target_type='number'."
        ]
    return "positions", ()


def _read_labels(owners: Sequence[str], ys: Sequence[Array], names: Sequence[str]) -> Array:
    for owner, y in zip(owners, ys, strict=True):
        wrong = np.argwhere((y != 0) & (y != 1))
        if len(wrong):
            row, column = wrong[0]
            raise DataError(
                f"client {owner!r}: label {names[column]!r} of sample {row} is {y[row, column]}, expected true or "
                "false, or 1 or 0; numbers to predict need target_type='number'"
            )
    return np.concatenate(ys).astype(bool)


def check_labels_differ(labels: Array, names: Sequence[str], where: str) -> None:
    """Refuse a label (n, L) that is the same in all rows."""
    same = np.flatnonzero(labels.all(axis=0) | ~labels.any(axis=0))
    if len(same):
        value = "true" if labels[0, same[0]] else "false"
        raise DataError(f"{where}: label {names[same[0]]!r} is {value} in all rows; leave it out of the targets")


def read_numbers(owners: Sequence[str], ys: Sequence[Array], names: Sequence[str] = ()) -> Array:
    """Return numbers to predict, (n_i,) or (n_i, M) with M names, as float32, after a check that they are finite."""
    for owner, y in zip(owners, ys, strict=True):
        wrong = np.argwhere(~(np.abs(y.astype(np.float64)) <= MAX_ABS_VALUE))
        if len(wrong):
            row, *column = wrong[0]
            what = f"target {names[column[0]]!r}" if names else "the target"
            raise DataError(
                f"client {owner!r}: {what} of sample {row} is {y[tuple(wrong[0])]}, expected a finite number of at "
                f"most {MAX_ABS_VALUE:g}; correct it or leave the sample out"
            )
    return np.concatenate(ys).astype(np.float32)


def check_targets_differ(encoded: Encoded) -> None:
    """Refuse a label that is the same in all rows, and a number, or one of several, likewise."""
    y = encoded.y
    if encoded.labels:
        check_labels_differ(y, encoded.labels, "y")
    elif not encoded.classes:
        for name, column in zip(encoded.outputs or [""], y.reshape(len(y), -1).T, strict=True):
            if column.min() == column.max():
                what = f"target {name!r} is {column[0]:g} in all samples" if name else f"all targets are {column[0]:g}"
                raise DataError(f"{what}; there is nothing to predict")


def _encode_positions(
    owners: Sequence[str], ys: Sequence[Array], joint: Array, classes: Sequence[str] | None, notes: Sequence[str]
) -> Encoded:
    """Check class numbers (n, *positions) and name their classes."""
    largest = joint[np.isfinite(joint)].max(initial=0)
    n_classes = int(largest) + 1 if classes is None else len(classes)
    for owner, y in zip(owners, ys, strict=True):
        wrong = np.argwhere((y != np.floor(y)) | ((y < 0) & (y != IGNORED)) | (y >= n_classes))
        if len(wrong):
            row, value = wrong[0][0], y[tuple(wrong[0])]
            raise DataError(
                f"client {owner!r}: sample {row} has the class {value} at a position, expected whole numbers from 0 "
                f"to {n_classes - 1}, or {IGNORED} where a position does not count"
            )
    if classes is None and n_classes > MAX_UNUSED_CLASSES:
        n_different = len(np.unique(joint[joint != IGNORED]))
        what = f"{n_different} different numbers up to {n_classes - 1}"
        if n_classes > MAX_UNUSED_CLASSES * n_different:
            raise DataError(
                f"the classes of positions are {what}; number the classes from 0 and write {IGNORED} where a position "
                "does not count, or give target_type='number'"
            )
        if n_classes > 2 * n_different:
            notes = [*notes, f"The classes of positions are {what}; write {IGNORED} where a position does not count."]
    if n_classes < 2:
        raise DataError("y has a single class at all positions; there is nothing to predict")
    names = tuple(classes) if classes is not None else tuple(str(c) for c in range(n_classes))
    return Encoded(joint.astype(np.int64), classes=names, notes=notes)
