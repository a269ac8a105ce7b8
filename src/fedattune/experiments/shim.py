"""Temporary."""

import inspect
from typing import Any


def reach(*a: Any, **k: Any) -> Any:
    from ..analysis.verdict import reach_verdict

    if "is_tuned" not in inspect.signature(reach_verdict).parameters:
        k.pop("is_tuned", None)
    return reach_verdict(*a, **k)


def to_json(v: Any) -> Any:
    return v.to_json() if hasattr(v, "to_json") else {}


def select(n: Any) -> Any:
    from ..analysis.verdict import notes

    return notes.select_notes(n) if hasattr(notes, "select_notes") else (n, [])
