"""The columns of a table that become features, and how to read them with a schema."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean, list_some
from ..schema import MISSING_CATEGORY, OTHER_CATEGORY, Names, Schema
from ..types import Array
from .checks import NUMBER_PATTERN, find_missing, read_numbers, read_target
from .dates import make_date_inputs, read_dates
from .file import MAX_NAMED_COLUMNS, TableFile, is_categorical, is_numeric, list_columns
from .text import hash_texts
from .tokens import encode_texts
from .unknown import take_unknown

MEND_OR_EXTEND = "correct the cell, or give all nodes a schema with it"
"""Advice for a value that the schema does not know."""


@dataclass
class FeatureColumns:
    """The features of a table's n rows by column, in the order in which the model gets them."""

    numbers: dict[str, Array] = field(default_factory=dict)  # (n,), NaN where missing
    flagged: list[str] = field(default_factory=list)  # numbers with a further column that marks the missing
    texts: dict[str, Array] = field(default_factory=dict)  # (n,), the category of each row
    categories: dict[str, Names] = field(default_factory=dict)
    dates: dict[str, str] = field(default_factory=dict)  # formats of the numbers that are days
    free_texts: dict[str, Array] = field(default_factory=dict)  # (n,), None where missing
    hashed: dict[str, int] = field(default_factory=dict)  # number of inputs of each free text
    tokens: dict[str, Array] = field(default_factory=dict)  # (n,), None where missing
    tokenizer: str = ""
    max_tokens: int | None = None
    gaps: dict[str, int] = field(default_factory=dict)  # number of missing values, where there are any
    notes: list[str] = field(default_factory=list)

    def add_numbers(self, name: str, values: Array, is_flagged: bool) -> None:
        """Add a column of numbers.

        Args:
            name: name of the column.
            values: numbers (n,), NaN where missing.
            is_flagged: whether a further column marks the missing values.

        """
        self.numbers[name] = values
        if is_flagged:
            self.flagged.append(name)
        self._count_gaps(name, np.isnan(values))

    def add_date(self, name: str, days: Array, format_: str, is_flagged: bool) -> None:
        """Add a column of dates.

        Args:
            name: name of the column.
            days: days since 1970 (n,), NaN where missing.
            format_: format of the dates.
            is_flagged: whether a further column marks the missing dates.

        """
        self.dates[name] = format_
        self.add_numbers(name, days, is_flagged)

    def add_free_text(self, name: str, values: Array, n_features: int) -> None:
        """Add a column of free text (n,), None where missing, that is hashed to some inputs."""
        self.free_texts[name], self.hashed[name] = values, n_features

    def add_tokens(self, name: str, values: Array, tokenizer: str, length: int) -> None:
        """Add a column whose text is read as token numbers.

        Args:
            name: name of the column.
            values: text (n,), None where missing.
            tokenizer: id or folder of a tokenizer, or `characters`.
            length: number of tokens of a row.

        """
        self.tokens[name], self.tokenizer, self.max_tokens = values, tokenizer, length

    def group_rare(self, name: str, most: int) -> None:
        """Group the rare categories of a column into one, so that at most `most` are left."""
        values, counts = np.unique(self.texts[name].astype(str), return_counts=True)
        kept = set(values[np.argsort(-counts, kind="stable")][: most - 1].tolist())
        is_rare = np.array([value not in kept for value in self.texts[name].tolist()])
        self.texts[name] = np.where(is_rare, OTHER_CATEGORY, self.texts[name])
        self.categories[name] = (*sorted(kept), OTHER_CATEGORY)
        self.notes.append(
            f"Column {name!r} has {len(values)} categories; the {len(values) - most + 1} rarest, {is_rare.sum()} rows, "
            f"are one category {OTHER_CATEGORY!r}."
        )

    def add_text(self, name: str, values: Array, categories: Names = ()) -> None:
        """Add a column of text.

        Args:
            name: name of the column.
            values: text (n,), None where missing.
            categories: all categories; by default the values that occur.

        """
        is_missing = find_missing(values)
        self.texts[name] = np.where(is_missing, MISSING_CATEGORY, values)
        self.categories[name] = categories or tuple(sorted(set(self.texts[name].tolist())))
        self._count_gaps(name, is_missing)

    def _count_gaps(self, name: str, is_missing: Array) -> None:
        if is_missing.any():
            self.gaps[name] = int(is_missing.sum())

    def describe_gaps(self) -> list[str]:
        """Say which columns lack values, and what they become."""
        numbers, texts = (
            [
                f"{name!r} ({count})"
                for name, count in self.gaps.items()
                if (name in self.numbers) == is_number
            ]
            for is_number in (True, False)
        )
        notes = []
        if numbers:
            notes.append(
                "Missing numbers become the median (the mean, with federated scaling) of the rows that scale them, and "
                f"a further column of 0 and 1 marks them: {list_some(numbers, MAX_NAMED_COLUMNS)}."
            )
        if texts:
            notes.append(f"Missing texts are a category of their own: {list_some(texts, MAX_NAMED_COLUMNS)}.")
        return notes

    @property
    def schema_columns(self) -> Names:
        """Names of the columns that became features."""
        return (*self.numbers, *self.texts, *self.free_texts, *self.tokens)

    def describe(self) -> list[str]:
        """Say what became of text and dates."""
        notes = []
        if self.texts:
            notes += [
                f"Text became categories in {list_columns(list(self.texts))}.",
                "The categories of all rows form one shared list, which every client would have to know.",
            ]
        if self.dates:
            notes.append(
                f"Dates became days, month, weekday and, with times, the hour: {list_columns(list(self.dates))}."
            )
        notes += [
            f"The words of column {name!r} are hashed to {n} inputs; nothing of them is shared."
            for name, n in self.hashed.items()
        ]
        notes += [
            f"The text of column {name!r} is read as at most {self.max_tokens} tokens ({self.tokenizer})."
            for name in self.tokens
        ]
        return notes

    def matrix(self) -> Array:
        """Return all features, float64 (n, F).

        Numbers come first, then marks of missing numbers, one column per category, waves of dates, hashed text, and
        token numbers.
        """
        flags = [np.isnan(self.numbers[name]) for name in self.flagged]
        one_hot = [
            # An unknown category has the number -1, and the last row holds only 0.
            np.eye(len(names) + 1, len(names), dtype=np.float32)[number_values(self.texts[name], names)]
            for name, names in ((name, self.categories[name]) for name in self.texts)
        ]
        waves = [make_date_inputs(self.numbers[name], format_) for name, format_ in self.dates.items()]
        hashed = [hash_texts(values, self.hashed[name]) for name, values in self.free_texts.items()]
        tokens = [
            encode_texts(values, self.tokenizer, self.max_tokens or 1) for values in self.tokens.values()
        ]
        parts = [*self.numbers.values(), *flags, *one_hot, *waves, *hashed, *tokens]
        return np.column_stack(parts).astype(np.float64, copy=False)

    def schema(self, classes: Names, target: str) -> Schema:
        """Return the schema with which other tables get the same features."""
        return Schema(
            classes=classes,
            numbers=tuple(self.numbers),
            flagged=tuple(self.flagged),
            categories=self.categories,
            dates=self.dates,
            texts=self.hashed,
            tokens=dict.fromkeys(self.tokens, self.tokenizer),
            max_tokens=self.max_tokens,
            target=target,
        )


def number_values(values: Array, names: Sequence[str]) -> Array:
    """Return the number of each value among the known ones, int64 (n,); -1 for any other value."""
    number = {value: k for k, value in enumerate(names)}
    return np.array([number.get(value, -1) for value in values.tolist()], dtype=np.int64)


def read_labels(path: Path, name: str, values: Array, classes: Names) -> Array:
    """Return the number of each row's class in a schema, int64 (n,); without classes, the target, float32 (n,).

    Args:
        path: file of the table, for messages.
        name: name of the target column.
        values: text or numbers (n,), complete.
        classes: names of the schema's classes.

    Raises:
        DataError: a value is no class of the schema.

    """
    if not classes:
        return read_target(path, name, values, "number")[0]
    labels = to_text(values)
    _check_values(path, f"target column {name!r}", labels, classes, "class", MEND_OR_EXTEND)
    return number_values(labels, classes)


def check_schema_columns(
    table: TableFile, schema: Schema, target: str, features: list[str] | str | None
) -> list[str]:
    """Return the feature columns that a schema asks for.

    Args:
        table: the table.
        schema: the schema.
        target: column of the class that the user names.
        features: columns that the user names; must be None.

    Raises:
        ConfigError: the schema is not for tables, or the user names other columns.
        DataError: a column is missing.

    """
    if not schema.columns:
        raise ConfigError(
            f"{table.path}: the schema names no columns; a table needs one with numbers or categories"
        )
    if features is not None:
        raise ConfigError("features: the schema names the features already; leave this option out")
    if target != schema.target:
        raise ConfigError(
            f"target is {target!r}, but the schema says {schema.target!r}; give the target of the schema"
        )
    for column in (*schema.columns, target):
        if column not in table.names:
            raise DataError(
                f"{table.path} has no column {column!r}, which the schema asks for; "
                f"{did_you_mean(column, table.names)}; add it, or rename the column that holds it"
            )
    return list(schema.columns)


def read_schema_features(table: TableFile, schema: Schema, *, is_prediction: bool = False) -> FeatureColumns:
    """Read the features that a schema asks for.

    Args:
        table: a table that has the schema's columns.
        schema: the schema.
        is_prediction: take what training did not have, with a note: missing numbers in columns that the schema does
            not flag, and unknown categories.

    Raises:
        DataError: a column holds values that the schema does not allow.

    """
    columns = FeatureColumns()
    for name in schema.numbers:
        format_ = schema.dates.get(name)
        values = _read_schema_numbers(table, name) if format_ is None else read_dates(table, name, format_)
        gaps = np.flatnonzero(np.isnan(values))
        if len(gaps) and name not in schema.flagged and not is_prediction:
            raise DataError(
                f"{table.path}: column {name!r} lacks {len(gaps)} of {len(values)} values, the first in data row "
                f"{gaps[0] + 1}, but the schema does not flag it; fill them in, or give all nodes a schema that "
                f"has {name!r} in `flagged`"
            )
        if format_ is None:
            columns.add_numbers(name, values, name in schema.flagged)
        else:
            columns.add_date(name, values, format_, name in schema.flagged)
    for name, n_features in schema.texts.items():
        columns.add_free_text(name, to_text(table.values(name)), n_features)
    for name, tokenizer in schema.tokens.items():
        columns.add_tokens(name, read_texts(table, name), tokenizer, schema.max_tokens or 1)
    for name, categories in schema.categories.items():
        texts = raw = _read_schema_texts(table, name, categories)
        if OTHER_CATEGORY in categories:
            known = {*categories, *([None] if MISSING_CATEGORY in categories else [])}
            texts = np.array(
                [one if one in known else OTHER_CATEGORY for one in texts.tolist()], dtype=object
            )
        if is_prediction:
            texts, notes = take_unknown(name, raw, texts, categories)
            columns.notes += notes
        columns.add_text(name, texts, categories)
        if not is_prediction:
            _check_values(
                table.path, f"column {name!r}", columns.texts[name], categories, "category", MEND_OR_EXTEND
            )
    return columns


def _read_schema_numbers(table: TableFile, name: str) -> Array:
    """Read a column of which the schema says that it holds numbers, float64 (n,), NaN where missing."""
    column = table.column(name)
    if column.null_count == len(column):
        return np.full(len(column), np.nan)
    if is_numeric(column.type):
        return read_numbers(table, name)
    if not is_categorical(column.type):
        raise DataError(
            f"{table.path}: column {name!r} has the type {column.type}, but the schema says that it holds numbers; "
            "store them as numbers"
        )
    values = table.values(name)
    rows = np.flatnonzero(~find_missing(values))
    wrong = [row for row in rows if NUMBER_PATTERN.fullmatch(values[row]) is None]
    row = wrong[0] if wrong else rows[0]
    advice = "correct that cell or leave it empty"
    if NUMBER_PATTERN.fullmatch(values[row].replace(",", ".", 1)) is not None:
        advice = "write numbers with a decimal point" if wrong else "store them as numbers"
    raise DataError(
        f"{table.path}: column {name!r} is text with {values[row]!r} in data row {row + 1}, but the schema says "
        f"that it holds numbers; {advice}"
    )


def _read_schema_texts(table: TableFile, name: str, categories: Names) -> Array:
    """Read a column of which the schema says that it holds text (n,), None where missing; 01 stays 01."""
    column = table.column(name)
    if table.is_csv and (column.null_count or not is_categorical(column.type)):
        # Pyarrow has taken 01 and true for other types, and a category called NA for a missing value.
        from pyarrow import csv

        table = table.with_text([name], set(csv.ConvertOptions().null_values) - set(categories))
        column = table.column(name)
    if column.null_count == len(column):
        return np.full(len(column), None)
    if is_categorical(column.type) or is_numeric(column.type):
        return to_text(table.values(name))
    raise DataError(
        f"{table.path}: column {name!r} has the type {column.type}, but the schema says that it holds text; store it "
        "as text"
    )


def read_texts(table: TableFile, name: str) -> Array:
    """Read a column of text word by word (n,), None where a cell is empty: NA and ? are words here."""
    column = table.column(name)
    if not is_categorical(column.type) and not is_numeric(column.type) and column.null_count < len(column):
        raise DataError(f"{table.path}: column {name!r} has the type {column.type}; tokens need text")
    return to_text((table.with_text([name], {""}) if table.is_csv else table).values(name))


def to_text(values: Array) -> Array:
    """Turn values (n,) into text: whole numbers without a decimal point, None where missing."""
    texts = [
        None if gap else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value, gap in zip(values.tolist(), find_missing(values).tolist(), strict=True)
    ]
    return np.array(texts, dtype=object)


def _check_values(path: Path, where: str, values: Array, allowed: Names, kind: str, advice: str) -> None:
    """Refuse values that the schema does not know; `kind` says what the values are, such as "class"."""
    strange = set(values.tolist()) - set(allowed)
    if not strange:
        return
    row = next(row for row, value in enumerate(values.tolist()) if value in strange)
    is_gap = kind == "category" and values[row] == MISSING_CATEGORY
    others = sorted(map(repr, strange - {values[row]}))
    more = f"; nor does it have {list_some(others, MAX_NAMED_COLUMNS)}" if others else ""
    raise DataError(
        f"{path}: {where} holds {'no value' if is_gap else repr(values[row])} in data row {row + 1}, which is no "
        f"{kind} of the schema; {did_you_mean(values[row], allowed)}; {advice}{more}"
    )
