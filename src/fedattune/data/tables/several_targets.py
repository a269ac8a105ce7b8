"""Several target columns of a table: labels of two values each, or numbers."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ..schema import Schema
from ..several_targets import Encoded, check_labels_differ
from ..types import Array
from .by_schema import read_label, read_schema_numbers, read_schema_target
from .checks import TargetType, find_missing, is_measured, read_complete_column, read_target
from .file import TableFile, is_categorical, is_numeric, list_columns
from .number_columns import read_numbers_as_written

Decimal = Literal["auto", ".", ","]


def read_several_targets(
    table: TableFile, names: Sequence[str], kind: TargetType, decimal: Decimal, notes: list[str]
) -> tuple[Encoded, TableFile]:
    """Read target columns that are all labels, or all numbers; return the table with numbers for written ones, too.

    `kind` says which they are, or is "auto".

    Raises:
        DataError: a column is neither, or some are labels and others numbers.
    """
    where = f"{table.path}: target columns"
    if kind == "class":
        raise DataError(f"{where} {list_columns(names)}: several columns are labels or numbers; give one for classes")
    values = {name: read_complete_column(table, name, "target") for name in names}
    labels = {name: found for name, one in values.items() if (found := read_label(one)) is not None}
    strange = [name for name in names if name not in labels]
    if kind == "number" or (kind == "auto" and not labels):
        table = read_numbers_as_written(table, list(names), decimal, notes)
        return Encoded(_read_numbers(table, names), outputs=tuple(names)), table
    if strange:
        example = f"{values[strange[0]][0]!s}"
        if kind == "auto" and all(_holds_numbers(values[name]) for name in strange):
            raise DataError(
                f"{where}: {list_columns(list(labels))} hold two values each and {list_columns(strange)} hold numbers; "
                "give columns of one kind, or --set table.target_type=number for numbers"
            )
        raise DataError(
            f"{where}: {list_columns(strange)} holds values such as {example!r}, expected 1 or 0, true or false, yes "
            "or no, in every target column; give one column for classes"
        )
    y = np.stack([labels[name] for name in names], axis=1)
    check_labels_differ(y, names, str(table.path))
    return Encoded(y, labels=tuple(names)), table


def _holds_numbers(values: Array) -> bool:
    return values.dtype.kind in "iuf" or is_measured(values)


def _read_numbers(table: TableFile, names: Sequence[str]) -> Array:
    each = [read_target(table, name, read_complete_column(table, name, "target"), "number")[0] for name in names]
    return np.stack(each, axis=1)


def read_schema_targets(table: TableFile, schema: Schema) -> Array:
    """Read the target columns of a schema: classes (n,), one number (n,), labels (n, L) or numbers (n, M)."""
    names = schema.target_columns
    each = [read_schema_target(table, name, schema) for name in names]
    return np.stack(each, axis=1) if len(each) > 1 else each[0]


def read_known_targets(table: TableFile, schema: Schema) -> Array | None:
    """Read what is known of several targets of new rows, float64 (n, parts), NaN where missing; None if not all are."""
    columns = []
    for name in schema.target_columns:
        if name not in table.names:
            return None
        kind = table.column(name).type
        if not (is_numeric(kind) or is_categorical(kind)):
            return None
        if schema.outputs:
            columns.append(read_schema_numbers(table, schema, name))
            continue
        values = table.values(name)
        is_gap = find_missing(values)
        label = read_label(values[~is_gap])
        if label is None:
            return None
        column = np.full(len(values), np.nan)
        column[~is_gap] = label
        columns.append(column)
    return np.stack(columns, axis=1)


def summarize_targets(y: Array) -> Array:
    """Return one number for each row's targets (n, ...), equal for equal labels; the first of several numbers."""
    if y.ndim == 1:
        return y
    return np.unique(y, axis=0, return_inverse=True)[1].reshape(-1) if y.dtype == bool else np.asarray(y[:, 0])
