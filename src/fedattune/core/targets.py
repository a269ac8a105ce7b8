"""Kinds of targets: the type and the shape of `y` tell what a model predicts."""

from collections.abc import Sequence
from typing import Any, Literal

TargetKind = Literal["class", "number", "labels", "numbers", "positions"]
"""One class, one number, several labels that are each true or false, several numbers, or one class per position."""

KIND_WORDS: dict[TargetKind, str] = {
    "class": "a class",
    "number": "a number",
    "labels": "several labels",
    "numbers": "several numbers",
    "positions": "a class for each position",
}
"""Kind -> what the target is, for sentences."""

NUMBER_KINDS: tuple[TargetKind, ...] = ("number", "numbers")
"""Kinds that are predicted with squared errors."""

IGNORED = -100
"""Class number of a position that counts neither in losses nor in metrics, as in PyTorch."""


def find_kind(y: Any) -> TargetKind:
    """Return the kind of targets y, a tensor or an array.

    int64 (n,) are classes, float (n,) are numbers, bool (n, L) are L labels, float (n, M) are M numbers, and int64
    (n, *positions) are classes of positions.
    """
    dtype = str(y.dtype).removeprefix("torch.")
    if dtype == "bool":
        return "labels"
    if dtype.startswith("float"):
        return "numbers" if y.ndim > 1 else "number"
    return "positions" if y.ndim > 1 else "class"


def describe_several(kind: TargetKind, labels: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Return the kind of a target of several parts, and the names of its labels or numbers, as facts; else nothing."""
    several = kind not in ("class", "number")
    return {"target_kind": kind, "target_names": list(labels or outputs)} if several else {}


def find_info_kind(classes: object, labels: object, outputs: object) -> TargetKind:
    """Return the kind of a target from the names of its classes, labels or numbers; none for one number."""
    return "class" if classes else "labels" if labels else "numbers" if outputs else "number"
