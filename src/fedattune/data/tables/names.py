"""Spellings of names: Nord, nord and 'Nord ' are most likely one."""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ...core.errors import list_some
from ..types import Array
from .file import MAX_NAMED_COLUMNS

MAX_NAMED_SPELLINGS = 3
"""Number of names whose spellings a note lists for each column."""
Spellings = list[list[str]]
"""The spellings of each name that has several, the most frequent one first."""


def _fold(name: str) -> str:
    """Return what all spellings of a name have in common."""
    return " ".join(unicodedata.normalize("NFC", name).split()).casefold()


def find_spellings(values: Array) -> Spellings:
    """Find names among texts (n,), None where missing, that differ only in case or blanks."""
    found: dict[str, list[str]] = {}
    counts = Counter(values.tolist())
    counts.pop(None, None)
    for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        found.setdefault(_fold(name), []).append(name)
    return [names for folded, names in found.items() if len(names) > 1 and folded]


def unify_spellings(values: Array, spellings: Spellings) -> Array:
    """Give texts (n,), None where missing, the most frequent spelling of their name, without blanks at its ends."""
    return _replace(values, {name: names[0].strip() for names in spellings for name in names})


def strip_names(values: Array) -> tuple[Array, bool]:
    """Return texts (n,), None where missing, without blanks at their ends, and whether there were any."""
    stripped = {one: one.strip() for one in set(values.tolist()) if one and one.strip() not in ("", one)}
    return _replace(values, stripped), bool(stripped)


def match_spellings(values: Array, known: Sequence[str]) -> tuple[Array, dict[str, str]]:
    """Replace unknown texts (n,), None where missing, by the one known name that differs only in case or blanks.

    Return the texts, and the replacements.
    """
    by_fold: dict[str, list[str]] = {}
    for name in known:
        by_fold.setdefault(_fold(name), []).append(name)
    strange = set(values.tolist()) - {None, *known}
    found = {one: names[0] for one in strange if len(names := by_fold.get(_fold(one), [])) == 1}
    return _replace(values, found), found


def describe_spellings(found: Mapping[str, Spellings], are_unified: bool) -> list[str]:
    """Say which names of which columns differ only in case or blanks."""
    if not found:
        return []
    listed = [
        f"{column!r} ({list_some([' = '.join(map(repr, names)) for names in spellings], MAX_NAMED_SPELLINGS)})"
        for column, spellings in found.items()
    ]
    where = list_some(listed, MAX_NAMED_COLUMNS)
    if are_unified:
        return [f"Names that differ only in case or blanks are one, as --normalize-names says: {where}."]
    return [f"Names that differ only in case or blanks count as different in {where}; --normalize-names unites them."]


def _replace(values: Array, names: Mapping[str, str]) -> Array:
    if not names:
        return values
    out = np.empty(len(values), dtype=object)
    out[:] = [names.get(one, one) for one in values.tolist()]
    return out
