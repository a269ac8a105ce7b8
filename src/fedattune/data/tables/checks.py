"""What a table's columns must be: complete clients and targets, and text that is no misspelt number."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..types import Array
from .file import column_to_numpy, is_categorical, is_numeric

MAX_CLASSES = 20  # for targets that are numbers


MAX_TEXT_CLASSES = 100


MIN_NUMBER_SHARE = 0.9  # text of which this share are numbers is meant as numbers


NUMBER_PATTERN = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)


MAX_ABS_VALUE = 1e30  # squares of such values leave float32, and no measurement is that large


MAX_SHOWN_COLUMNS = 6  # columns named in an example of `features`


def read_complete_column(path: Path, content: Any, name: str, role: str) -> Array:
    """All values of a column in which none may be missing; empty text is missing, "NA" is a name."""
    column = content.column(name)
    if not (is_categorical(column.type) or is_numeric(column.type) or column.null_count == len(column)):
        raise DataError(
            f"{path}: {role} column {name!r} has the type {column.type}; expected text or numbers"
        )
    values: Array = column_to_numpy(column)
    gaps = np.flatnonzero(find_missing(values) | (values == "" if values.dtype == object else False))
    if len(gaps):
        raise DataError(
            f"{path}: {role} column {name!r} lacks {len(gaps)} of {len(values)} values, the first in data "
            f"row {gaps[0] + 1}; fill them in or delete these rows"
        )
    return values.astype(str) if values.dtype == object else values


def find_missing(values: Array) -> Array:
    """Where a column has no value: None in text, NaN in numbers."""
    if values.dtype == object:
        return np.array([value is None for value in values], dtype=bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def read_target(path: Path, name: str, values: Array) -> tuple[Array, tuple[str, ...]]:
    """Class numbers (n,) and the classes' names.

    Raises:
        DataError: the values are continuous, all alike, or too many to be classes.

    """
    if values.dtype.kind == "f" and (values == np.floor(values)).all():
        values = values.astype(np.int64)
    known, times = np.unique(values, return_counts=True)
    where, n_values = f"{path}: target column {name!r}", len(known)
    text = values.dtype.kind == "U"
    numeric = values.dtype.kind in "iuf" or (text and find_numbers(values).mean() >= MIN_NUMBER_SHARE)
    if values.dtype.kind == "f" or (numeric and n_values > MAX_CLASSES):
        raise DataError(
            f"{where} is continuous: {n_values} different numbers{' (written as text)' * text}, and fedattune "
            f"does classification only for now; bin it into classes, or, if its numbers name more than "
            f"{MAX_CLASSES} classes, put a letter before them, such as c7"
        )
    if n_values < 2:
        raise DataError(f"{where} has the single class {values[0]!s}; nothing to learn")
    alone = int((times == 1).sum())
    if text and (n_values > MAX_TEXT_CLASSES or alone > len(values) / 2):
        raise DataError(
            f"{where} has {n_values} different texts in {len(values)} rows, {alone} of them only once; a target "
            f"needs at most {MAX_TEXT_CLASSES} classes that come back; take another column or group its values"
        )
    return encode_values(values)


def encode_values(values: Array) -> tuple[Array, tuple[str, ...]]:
    """Numbers of the sorted different values, and these as text."""
    known, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), tuple(str(value) for value in known)


def find_numbers(texts: Array) -> Array:
    """Which texts (n,) are numbers, with a decimal point or comma."""
    is_number = {
        text: NUMBER_PATTERN.fullmatch(text.replace(",", ".", 1)) is not None for text in set(texts.tolist())
    }
    return np.array([is_number[text] for text in texts.tolist()], dtype=bool)


def check_text_column(path: Path, name: str, kind: Any, values: Array, features: Sequence[str]) -> None:
    """Refuse a text column that is meant as numbers; one that is declared as categories is none.

    Raises:
        DataError: nearly all of its cells are numbers.

    """
    from pyarrow import types

    rows = np.flatnonzero(~find_missing(values))
    is_number = find_numbers(values[rows])
    if types.is_dictionary(kind) or is_number.mean() < MIN_NUMBER_SHARE:
        return
    plain = np.array([NUMBER_PATTERN.fullmatch(text) is not None for text in values[rows]])
    wrong = np.flatnonzero(~is_number if not is_number.all() else ~plain)
    row = rows[wrong[0]] if len(wrong) else rows[0]
    if not is_number.all():
        advice = "mend that cell or leave it empty"
    elif len(wrong):
        advice = "write numbers with a decimal point"
    else:
        advice = "store them as numbers, or, if they name categories, put a letter before them"
    raise DataError(
        f"{path}: column {name!r} is text with {str(values[row])!r} in data row {row + 1}, but "
        f"{int(is_number.sum())} of its {len(rows)} values are numbers; {advice}, or {suggest_features(name, features)}"
    )


def read_numbers(path: Path, name: str, column: Any) -> Array:
    """The values of a column of numbers, float64 (n,), NaN where missing.

    Raises:
        DataError: one is too large.

    """
    numbers: Array = column_to_numpy(column).astype(np.float64)
    wrong = np.flatnonzero(np.abs(numbers) > MAX_ABS_VALUE)
    if len(wrong):
        raise DataError(
            f"{path}: column {name!r} holds {numbers[wrong[0]]} in data row {wrong[0] + 1}; values must be "
            f"finite and at most {MAX_ABS_VALUE:g} in size; mend them or leave them empty"
        )
    return numbers


def suggest_features(name: str, features: Sequence[str]) -> str:
    """How to use the other columns, as a command-line option that works."""
    others = [other for other in features if other != name]
    if not others:
        return "take another column"
    shown = [
        other if re.fullmatch(r"[A-Za-z_]\w*", other) else json.dumps(other)
        for other in others[:MAX_SHOWN_COLUMNS]
    ]
    among = " (and so on)" if len(others) > MAX_SHOWN_COLUMNS else ""
    return f"leave it out by naming the features to use: --set 'features=[{','.join(shown)}]'{among}"
