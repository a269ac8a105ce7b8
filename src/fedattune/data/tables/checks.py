"""Check a table's columns: complete clients and targets, misspelt numbers, ids, columns that give the target away."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ...core.errors import DataError, list_some
from ...core.options import format_value
from ..types import Array
from .file import MAX_NAMED_COLUMNS, TableFile, is_categorical, is_numeric
from .written_numbers import (
    MIN_NUMBER_SHARE,
    find_mixed_units,
    has_other_unit,
    is_number_like,
    read_written,
    to_numbers,
)

MAX_NUMBER_CLASSES = 20
MAX_TEXT_CLASSES = 100
MAX_EXACT = 2.0**53  # whole numbers above this are rounded as float64
MAX_ABS_VALUE = 1e30  # squares of such values leave float32, and no measurement is that large
MAX_EXAMPLE_COLUMNS = 6
"""Number of columns in an example of `features`."""


def read_complete_column(table: TableFile, name: str, role: str) -> Array:
    """Read text or numbers (n,) that may not lack values; an empty text is a missing value, "NA" is not."""
    column = table.column(name)
    if not (is_categorical(column.type) or is_numeric(column.type) or column.null_count == len(column)):
        raise DataError(f"{table.path}: {role} column {name!r} has the type {column.type}; expected text or numbers")
    values = table.values(name)
    gaps = np.flatnonzero(find_empty(values))
    if len(gaps):
        raise DataError(
            f"{table.path}: {role} column {name!r} lacks {len(gaps)} of {len(values)} values, the first in data "
            f"row {table.data_row(gaps[0])}; fill them in or delete these rows"
        )
    return values


def find_missing(values: Array) -> Array:
    """Mark the missing values of a column, (n,): None in text, NaN in numbers."""
    if values.dtype == object:
        return np.array([value is None for value in values], dtype=bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def find_empty(values: Array) -> Array:
    """Mark the missing values of a client or target column, (n,): empty texts are missing, too."""
    return find_missing(values) | (values == "" if values.dtype == object else False)


TargetType = Literal["auto", "class", "number", "label"]


def read_target(table: TableFile, name: str, values: Array, kind: TargetType = "auto") -> tuple[Array, tuple[str, ...]]:
    """Turn the values (n,) of the target into class numbers, int64, with names, or into numbers to predict, float32.

    `auto` takes fractions, and more than MAX_NUMBER_CLASSES different numbers, as numbers to predict.
    """
    where = f"{table.path}: target column {name!r}"
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"{where} holds {values[row]} in data row {table.data_row(row)}; correct it or leave it empty"
            )
        if (values == np.floor(values)).all() and (np.abs(values) < MAX_EXACT).all():
            values = values.astype(np.int64)
    times = list(Counter(values.tolist()).values())
    n_values, is_text = len(times), values.dtype == object
    if kind == "number" or (kind == "auto" and is_measured(values)):
        return _read_number_target(table, where, values, n_values), ()
    if values.dtype.kind == "f" and (np.abs(values) >= MAX_EXACT).any():
        row = int(np.flatnonzero(np.abs(values) >= MAX_EXACT)[0])
        raise DataError(
            f"{where} holds {values[row]:.0f} in data row {table.data_row(row)}, and numbers of such a size are "
            "rounded, so that classes become one; store the column as text, or give --set table.target_type=number"
        )
    if n_values < 2:
        raise DataError(f"{where} has the single class {values[0]!s}; a target needs two classes or more")
    n_single = times.count(1)
    if is_text and (n_values > MAX_TEXT_CLASSES or n_single > len(values) / 2):
        raise DataError(
            f"{where} has {n_values} different texts in {len(values)} rows, {n_single} of them only once; a target "
            f"needs at most {MAX_TEXT_CLASSES} classes that come back; take another column or group its values"
        )
    return encode_values(values)


def is_measured(values: Array) -> bool:
    """Tell whether the values (n,) of a target are numbers to predict, not classes."""
    if values.dtype.kind == "f":
        return True
    if values.dtype == object:
        from pyarrow import array

        numbers = read_written(array(values.tolist()))
        if numbers is None or numbers.share < MIN_NUMBER_SHARE:
            return False
        if numbers.wrong is None and any(not value.is_integer() for value in numbers.values.values()):
            return True
    elif values.dtype.kind not in "iu":
        return False
    return len(set(values.tolist())) > MAX_NUMBER_CLASSES


def _read_number_target(table: TableFile, where: str, values: Array, n_values: int) -> Array:
    """Return the values (n,) as float32."""
    if values.dtype == object:
        advice = "correct that cell, or give --set table.target_type=class"
        values = to_numbers(where, values, None, None, advice, data_row=table.data_row)
    numbers = values.astype(np.float64)
    if n_values < 2:
        raise DataError(f"{where} has the single value {values[0]!s}; there is nothing to predict")
    if not (np.abs(numbers) <= MAX_ABS_VALUE).all():
        row = int(np.flatnonzero(~(np.abs(numbers) <= MAX_ABS_VALUE))[0])
        raise DataError(
            f"{where} holds {numbers[row]} in data row {table.data_row(row)}, which is too large; correct it"
        )
    return numbers.astype(np.float32)


def encode_values(values: Array) -> tuple[Array, tuple[str, ...]]:
    """Return the number (n,) of each value among the sorted different values, and these values as text."""
    if values.dtype == object:
        names = tuple(sorted(set(values.tolist())))
        return number_values(values, names), names
    categories, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), tuple(str(value) for value in categories)


def number_values(values: Array, names: Sequence[str]) -> Array:
    """Return the number of each value among the known ones, int64 (n,); -1 for any other value."""
    number = {value: k for k, value in enumerate(names)}
    return np.array([number.get(value, -1) for value in values.tolist()], dtype=np.int64)


def check_text_column(table: TableFile, name: str, features: Sequence[str], max_categories: int) -> str:
    """Refuse a text column of nearly all numbers that could not be read, unless the file declares categories.

    Return what to say of one that is taken as categories all the same.
    """
    from pyarrow import compute, types

    column = table.column(name)
    numbers = None if types.is_dictionary(column.type) else read_written(column)
    if numbers is None:
        return ""
    where, way_out = f"{table.path}: column {name!r}", suggest_features(name, features)
    if mixed := find_mixed_units(numbers):
        if len(compute.unique(column)) > max_categories:
            raise DataError(
                f"{where} holds numbers in several units, {list_some(mixed, MAX_NAMED_COLUMNS)}; convert them to one "
                f"unit, or {way_out}"
            )
        return f"Column {name!r} has several units, {list_some(mixed, MAX_NAMED_COLUMNS)}; its cells are categories."
    wrong = numbers.wrong
    has_units = wrong is not None and numbers.format.unit and has_other_unit(wrong, numbers)
    if numbers.share < MIN_NUMBER_SHARE or has_units:
        return ""
    cells = column.to_pylist()
    if wrong is None:
        wrong = next(cell for cell in cells if cell is not None)
        advice = "store them as numbers, or, if they name categories, put a letter before them"
    elif is_number_like(wrong):
        advice = f"its decimal sign is not that of {numbers.format.example!r}; write all with one sign"
    else:
        advice = "correct that cell or leave it empty"
    n_numbers = sum(cell in numbers.values for cell in cells)
    raise DataError(
        f"{where} is text with {format_value(wrong)} in data row {table.data_row(cells.index(wrong))}, but {n_numbers} "
        f"of its {len(cells) - column.null_count} values are numbers; {advice}, or {way_out}"
    )


def read_numbers(table: TableFile, name: str) -> Array:
    """Read a column of numbers, float64 (n,), NaN where missing."""
    numbers = table.values(name).astype(np.float64)
    wrong = np.flatnonzero(np.abs(numbers) > MAX_ABS_VALUE)
    if len(wrong):
        raise DataError(
            f"{table.path}: column {name!r} holds {numbers[wrong[0]]} in data row {table.data_row(wrong[0])}; values "
            f"must be finite and at most {MAX_ABS_VALUE:g} in size; correct them or leave them empty"
        )
    return numbers


def suggest_features(name: str, features: Sequence[str]) -> str:
    """Return the advice to leave a column out, with a command-line option that does it."""
    others = [other for other in features if other != name]
    if not others:
        return "take another column"
    some = others[:MAX_EXAMPLE_COLUMNS]
    examples = [other if re.fullmatch(r"[A-Za-z_]\w*", other) else json.dumps(other) for other in some]
    among = " (and so on)" if len(others) > MAX_EXAMPLE_COLUMNS else ""
    return f"leave it out by naming the features to use: --set 'features=[{','.join(examples)}]'{among}"


MAX_AUDIT_ROWS, MAX_AUDIT_COLUMNS = 5_000, 200
"""Rows and columns that are looked at, so that large tables load fast."""
REVEALING_SCORE = 0.95
"""Balanced accuracy, or R2, of one column alone, above which it is called revealing."""
MIN_COUNTED_ROWS = 100
MIN_CLASS_ROWS = 6
"""Rows below which a class is left out of the check."""
MIN_ID_SHARE = 0.5
"""Share of different numbers above which a column that is called an id is one."""
CALLED_ID = re.compile(r"(^|[_\W])(id|ID|Id)$|[a-z](ID|Id)$")
ID_PATTERN = re.compile(
    r"(^|[_\W])(id|index|idx|no|nr|number|key|row|rownames?)$|^(unnamed.*|rownames?)$", re.IGNORECASE
)


def is_index(name: str, values: Array) -> bool:
    """Tell whether a column of numbers (n,) counts or names the rows.

    Its whole numbers are all different, and it is called so; or it counts MIN_COUNTED_ROWS rows one by one. An id may
    come back, such as a patient's at each visit.
    """
    if len(values) < 3 or not np.isfinite(values).all() or (values != np.floor(values)).any():
        return False
    n_different = len(np.unique(values))
    if n_different < len(values):
        return CALLED_ID.search(name) is not None and n_different > MIN_ID_SHARE * len(values)
    is_count = len(values) >= MIN_COUNTED_ROWS and bool((np.diff(values) == 1).all())
    return is_count or ID_PATTERN.search(name) is not None or CALLED_ID.search(name) is not None


class Finding(NamedTuple):
    """The prediction of the target from one column alone."""

    score: float  # cross-validated balanced accuracy, or R2
    label: int | None  # the class that the column tells from all others; None if it tells the whole target


def find_revealing(columns: Mapping[str, Array], y: Array) -> dict[str, Finding]:
    """Find the columns that predict the target y (n,), or one of its classes, nearly perfectly alone.

    Columns hold numbers or codes of categories (n,), NaN where missing.
    """
    rows = np.random.default_rng(0).permutation(len(y))[:MAX_AUDIT_ROWS]
    is_classes = y.dtype.kind in "iu"
    target = y[rows]
    if is_classes:
        labels, times = np.unique(target, return_counts=True)
        is_frequent = times[np.searchsorted(labels, target)] >= MIN_CLASS_ROWS
        rows, target = rows[is_frequent], target[is_frequent]
        if (times >= MIN_CLASS_ROWS).sum() < 2:
            return {}
    found = {}
    for name, values in list(columns.items())[:MAX_AUDIT_COLUMNS]:
        x = np.nan_to_num(values[rows].astype(np.float64), nan=-1e9)[:, None]
        finding = _score_classes(x, target) if is_classes else Finding(_score_numbers(x, target), None)
        if finding.score >= REVEALING_SCORE:
            found[name] = finding
    return found


def _score_numbers(x: Array, y: Array) -> float:
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeRegressor

    model = DecisionTreeRegressor(max_depth=8, random_state=0)
    return float(cross_val_score(model, x, y, cv=3, scoring="r2").mean())


def _score_classes(x: Array, y: Array) -> Finding:
    """Score the prediction of all classes, or, if that is poor, of the class that is told best from the others."""
    from sklearn.model_selection import cross_val_predict
    from sklearn.tree import DecisionTreeClassifier

    guess = cross_val_predict(DecisionTreeClassifier(max_depth=4, random_state=0), x, y, cv=3)
    labels = np.unique(y)
    recall = np.array([(guess[y == label] == label).mean() for label in labels])
    specificity = np.array([(guess[y != label] != label).mean() for label in labels])
    each = (recall + specificity) / 2
    best = int(each.argmax())
    if recall.mean() >= REVEALING_SCORE or len(labels) == 2:
        return Finding(float(recall.mean()), None)
    return Finding(float(each[best]), int(labels[best]))
