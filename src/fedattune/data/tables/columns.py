"""The columns of a table that become features, and how they are read where a schema says what they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean
from ..schema import MISSING_CATEGORY, Names, Schema
from ..types import Array
from .checks import NUMBER_PATTERN, find_missing, read_numbers
from .file import column_to_numpy, is_categorical, is_numeric, read_text_columns


@dataclass
class FeatureColumns:
    """A table's features by column, in the order in which the model gets them."""

    numbers: dict[str, Array] = field(default_factory=dict)  # (n,), NaN where missing
    flagged: list[str] = field(default_factory=list)  # numbers with a further column that marks the missing
    texts: dict[str, Array] = field(default_factory=dict)  # (n,), the category of each row
    categories: dict[str, Names] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_numbers(self, name: str, values: Array, flagged: bool) -> None:
        """Take up a column of numbers; if it is flagged, a further one marks what is missing."""
        self.numbers[name] = values
        gaps = int(np.isnan(values).sum())
        if flagged:
            self.flagged.append(name)
        if gaps:
            self.notes.append(
                f"Column {name!r} lacks {gaps} values; they become the median of the client's own "
                "training part, and a further column of 0 and 1 marks them."
            )

    def add_text(self, name: str, values: Array, categories: Names = ()) -> None:
        """Take up a column of text, None where missing; its categories are those that occur or those given."""
        gaps = find_missing(values)
        self.texts[name] = np.where(gaps, MISSING_CATEGORY, values)
        self.categories[name] = categories or tuple(sorted(set(self.texts[name].tolist())))
        if gaps.any():
            self.notes.append(f"Column {name!r} lacks {gaps.sum()} values; they are a category of their own.")

    def schema(self, classes: Names, target: str) -> Schema:
        """What other tables need to get the same features."""
        return Schema(
            classes=classes,
            numbers=tuple(self.numbers),
            flagged=tuple(self.flagged),
            categories=self.categories,
            target=target,
        )


def encode_one_hot(values: Array, categories: Names) -> Array:
    """One column per category, float64 (n, categories)."""
    number = {category: k for k, category in enumerate(categories)}
    return np.eye(len(categories))[[number[value] for value in values.tolist()]]


def read_labels(path: Path, name: str, values: Array, classes: Names) -> Array:
    """The number of each row's class among those of a schema, int64 (n,).

    Raises:
        DataError: a value is none of them.

    """
    labels = to_text(values)
    check_known(path, f"target column {name!r}", labels, classes, "class")
    number = {label: k for k, label in enumerate(classes)}
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64)


def check_schema_columns(
    path: Path, known: Sequence[str], schema: Schema, target: str, features: list[str] | str | None
) -> list[str]:
    """The feature columns that a schema asks for in a table with the columns `known`.

    Raises:
        ConfigError: the schema is none of tables, or something else is asked for, too.
        DataError: a column is missing.

    """
    if not schema.columns:
        raise ConfigError(
            f"{path}: the schema names no columns; a table needs one with numbers or categories"
        )
    if features is not None:
        raise ConfigError("features: the schema names them already; give one of both")
    if target != schema.target:
        raise ConfigError(f"target is {target!r}, but the schema says {schema.target!r}; give the same")
    for column in (*schema.columns, target):
        if column not in known:
            raise DataError(
                f"{path} has no column {column!r}, which the schema asks for; {did_you_mean(column, known)}; add "
                "it, or rename the column that holds it"
            )
    return list(schema.columns)


def read_schema_features(path: Path, content: Any, schema: Schema) -> FeatureColumns:
    """The features that a schema asks for.

    Raises:
        DataError: a column holds what the schema does not know.

    """
    found = FeatureColumns()
    for name in schema.numbers:
        values = read_schema_numbers(path, name, content.column(name))
        gaps = np.flatnonzero(np.isnan(values))
        if len(gaps) and name not in schema.flagged:
            raise DataError(
                f"{path}: column {name!r} lacks {len(gaps)} of {len(values)} values, the first in data row "
                f"{gaps[0] + 1}, but the schema does not flag it; fill them in, or give all nodes a schema that "
                f"has {name!r} in `flagged`"
            )
        found.add_numbers(name, values, name in schema.flagged)
    for name, categories in schema.categories.items():
        values = read_schema_texts(path, name, content.column(name), categories)
        found.add_text(name, values, categories)
        check_known(path, f"column {name!r}", found.texts[name], categories, "category")
    return found


def read_schema_numbers(path: Path, name: str, column: Any) -> Array:
    """Read a column as numbers, as the schema says."""
    if column.null_count == len(column):
        return np.full(len(column), np.nan)
    if is_numeric(column.type):
        return read_numbers(path, name, column)
    if not is_categorical(column.type):
        raise DataError(
            f"{path}: column {name!r} has the type {column.type}, but the schema says that it holds numbers"
        )
    values = column_to_numpy(column)
    rows = np.flatnonzero(~find_missing(values))
    wrong = [row for row in rows if NUMBER_PATTERN.fullmatch(values[row]) is None]
    row = wrong[0] if wrong else rows[0]
    comma = NUMBER_PATTERN.fullmatch(values[row].replace(",", ".", 1)) is not None
    advice = "mend that cell or leave it empty"
    if comma:
        advice = "write numbers with a decimal point" if wrong else "store them as numbers"
    raise DataError(
        f"{path}: column {name!r} is text with {values[row]!r} in data row {row + 1}, but the schema says that "
        f"it holds numbers; {advice}"
    )


def read_schema_texts(path: Path, name: str, column: Any, categories: Names) -> Array:
    """Read a column as texts of these categories."""
    """Text, None where missing; numbers are read as they are written."""
    if path.suffix.lower() == ".csv" and (column.null_count or not is_categorical(column.type)):
        # Pyarrow took 01 and true for something else, and a category called NA for a missing value.
        from pyarrow import csv

        column = read_text_columns(path, [name], set(csv.ConvertOptions().null_values) - set(categories))[
            name
        ]
    if column.null_count == len(column):
        return np.full(len(column), None)
    if is_categorical(column.type) or is_numeric(column.type):
        return to_text(column_to_numpy(column))
    raise DataError(
        f"{path}: column {name!r} has the type {column.type}, but the schema says that it holds text"
    )


def to_text(values: Array) -> Array:
    """Values as text, whole numbers without a decimal point, None where missing."""
    gaps = find_missing(values)
    texts = [
        None if gap else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value, gap in zip(values.tolist(), gaps.tolist(), strict=True)
    ]
    return np.array(texts, dtype=object)


def check_known(
    path: Path,
    where: str,
    values: Array,
    known: Names,
    what: str,
    advice: str = "mend the cell, or give all nodes a schema with it",
) -> None:
    """Check that every text is one of the known ones."""
    strange = set(values.tolist()) - set(known)
    if not strange:
        return
    row = next(row for row, value in enumerate(values.tolist()) if value in strange)
    shown = "no value" if what == "category" and values[row] == MISSING_CATEGORY else repr(values[row])
    raise DataError(
        f"{path}: {where} holds {shown} in data row {row + 1}, which is no {what} of the schema; "
        f"{did_you_mean(values[row], known)}; {advice}"
    )
