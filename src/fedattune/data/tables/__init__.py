"""Tables: CSV or Parquet files with a client column, features and a class to predict."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import ConfigError, DataError
from ...core.options import Count
from ..dataset import Dataset
from ..schema import Schema
from ..types import Array, Index, Scaling
from .by_schema import check_schema_columns, read_labels, read_schema_features, read_texts
from .checks import (
    TargetType,
    check_text_column,
    encode_values,
    find_missing,
    find_revealing,
    is_index,
    read_complete_column,
    read_numbers,
    read_target,
    suggest_features,
)
from .columns import FeatureColumns, number_values
from .dates import find_date_format, read_dates, read_times
from .file import TableFile, find_stem, is_categorical, is_numeric, list_columns, read_table
from .scaling import choose_scaling, fit_all_constants, standardise
from .texts import DEFAULT_MAX_TOKENS, DEFAULT_TEXT_FEATURES, is_free_text

MAX_CATEGORIES = 100
ID_SHARE = 0.5
"""Share of different texts above which a column of short texts names the rows."""


def load_table(
    path: Path | str,
    schema: Schema | None = None,
    *,
    client_column: str | None,
    target: str,
    features: list[str] | str | None = None,
    target_type: TargetType = "auto",
    group_column: str | None = None,
    drop_columns: list[str] | str | None = None,
    missing: Literal["impute", "drop"] = "impute",
    normalize_names: bool = False,
    client_feature: bool = False,
    text_columns: list[str] | str | None = None,
    text_features: Count = DEFAULT_TEXT_FEATURES,
    max_categories: Count = MAX_CATEGORIES,
    tokens: str | None = None,
    max_tokens: Count = DEFAULT_MAX_TOKENS,
) -> Dataset:
    """A CSV or Parquet table whose rows belong to the clients named in one of its columns.

    Missing numbers become the median, and all numbers are standardised, by constants of training rows (--scaling).
    Categories are one-hot, the rare ones of many as one. Dates become days, month, weekday and hour, and free text
    hashed words. Columns that count or name the rows are left out, unless `features` names them.

    Args:
        schema: columns, categories and classes that all tables of a federation share. Without a schema, the
            content of this table decides.
        client_column: column that names each row's client; None if the rows have no clients of their own.
        features: columns of numbers or categories, in a list or with commas between; by default all other
            columns except an index that pandas stored.
        target_type: `class` or `number`; `auto` takes fractions, and more than 20 different numbers, as numbers.
        missing: `impute` fills missing numbers with the median and gives missing text a category; `drop` leaves out
            rows that lack a feature.
        text_columns: columns of free text, in a list or with commas between; by default those with many different
            texts of three words and more.
        max_categories: categories of a column above which the rare ones are grouped.
        tokens: read the one text column as token numbers, by the tokenizer with this id or folder, or `characters`.

    Raises:
        DataError: the file cannot be read, or a column cannot be used; the message names it.
        ConfigError: a column is named twice, or the schema names other columns.
    """
    table = read_table(Path(path), client_column, target)
    is_chosen = features is not None
    if schema is not None:
        features = check_schema_columns(table, schema, target, features)
    feature_names = _choose_features(table, client_column, target, features)
    dropped = _read_names(drop_columns, table, "drop_columns")
    feature_names = [name for name in feature_names if name not in dropped]
    notes = [f"A sign such as ? is a missing value in {list_columns(table.signed)}."] if table.signed else []
    if dropped:
        notes.append(f"Left out, as --drop-columns says: {list_columns(dropped)}.")
    table = _drop_incomplete(table, [name for name in (client_column, target) if name is not None], notes)
    if missing == "drop":
        table = _drop_rows_with_gaps(table, feature_names, notes)
    owner, owners = None, tuple[str, ...]()
    if client_column is not None:
        owner, owners = encode_values(read_complete_column(table, client_column, "client").astype(str))
        notes.append(f"Column {client_column!r} names {len(owners)} clients.")
    labels = read_complete_column(table, target, "target")
    if schema is None:
        y, classes = read_target(table.path, target, labels, target_type)
        free = _read_names(text_columns, table, "text_columns")
        if tokens is not None:
            columns = _read_tokens(table, feature_names, tokens, max_tokens)
        else:
            reader = FeatureReader(table, free, text_features, max_categories, may_leave_out=not is_chosen)
            columns = reader.read(feature_names)
        notes += columns.describe_gaps() + columns.notes + _warn_of_revealing(columns, y, classes)
    else:
        y, classes = read_labels(table.path, target, labels, schema.classes), schema.classes
        columns = read_schema_features(table, schema)
        strange = [name for name in table.names if name not in (*feature_names, client_column, target)]
        if strange:
            notes.append(f"The schema does not have the columns {', '.join(strange)}; they are left out.")
        notes += columns.describe_gaps() + columns.notes
    x = columns.matrix()
    return Dataset(
        name=find_stem(table.path),
        x=x,
        y=y,
        classes=classes,
        owner=owner,
        owners=owners,
        encode=partial(encode_features, x, len(columns.numbers)),
        read_times=partial(read_times, table),
        notes=tuple(notes),
        schema=schema or columns.schema(classes, target),
    )


def _read_tokens(table: TableFile, names: Sequence[str], tokenizer: str, length: int) -> FeatureColumns:
    """Read the only feature, a column of text, as token numbers."""
    if len(names) != 1:
        example = next((name for name in names if is_categorical(table.column(name).type)), names[0])
        others = ",".join(name for name in names if name != example)
        raise DataError(
            f"{table.path}: tokens read one text column, got {len(names)} features, {list_columns(list(names))}; give "
            f"--set features={example}, or --drop-columns {others}"
        )
    columns = FeatureColumns()
    columns.add_tokens(names[0], read_texts(table, names[0]), tokenizer, length)
    if all(value is None for value in columns.tokens[names[0]].tolist()):
        raise DataError(f"{table.path}: no feature column holds any value")
    columns.notes += columns.describe()
    return columns


def _read_names(given: list[str] | str | None, table: TableFile, option: str) -> list[str]:
    """Return columns that the user names, after a check that they are there."""
    if given is None:
        return []
    if isinstance(given, str):  # one column whose name may hold a comma, or several columns
        given = [given] if given in table.names else [name.strip() for name in given.split(",") if name.strip()]
    for name in given:
        if name not in table.names:
            raise table.lacks(name, f" of {option}")
    return given


def _drop_incomplete(table: TableFile, names: Sequence[str], notes: list[str]) -> TableFile:
    """Leave out rows without a client or a target, and say how many."""
    from pyarrow import types

    for name in names:
        kind = table.column(name).type
        if not (is_categorical(kind) or is_numeric(kind)) and not types.is_null(kind):
            continue  # a later check refuses the type
        values = table.values(name)
        gaps = find_missing(values) | (values == "" if values.dtype == object else False)
        n_gaps = int(gaps.sum())
        if n_gaps == len(values):
            raise DataError(f"{table.path}: column {name!r} holds no value; name another column")
        if n_gaps:
            first = int(np.flatnonzero(gaps)[0])
            notes.append(
                f"{n_gaps} of {len(values)} rows have no value in column {name!r} and are left out, the first is data "
                f"row {table.data_row(first)}."
            )
            table = table.select(~gaps)
    return table


def _drop_rows_with_gaps(table: TableFile, names: Sequence[str], notes: list[str]) -> TableFile:
    """Leave out rows that lack a feature, and say how many; columns without any value do not count."""
    is_whole = np.ones(table.n_rows, dtype=bool)
    for name in names:
        column = table.column(name)
        kind = column.type
        if is_categorical(kind) or is_numeric(kind):
            is_valid = ~find_missing(table.values(name))
        else:
            is_valid = np.asarray(column.is_valid().to_numpy())
        if is_valid.any():
            is_whole &= is_valid
    if not is_whole.any():
        raise DataError(f"{table.path}: every row lacks a feature; give --missing impute, or leave columns out")
    if is_whole.all():
        return table
    notes.append(f"{(~is_whole).sum()} of {table.n_rows} rows lack a feature and are left out (--missing drop).")
    return table.select(is_whole)


def _warn_of_revealing(columns: FeatureColumns, y: Array, classes: Sequence[str]) -> list[str]:
    """Warn of columns that predict the target nearly perfectly alone: they may not be known in time."""
    codes = {name: number_values(values, columns.categories[name]) for name, values in columns.texts.items()}
    warnings = []
    for name, (score, label) in find_revealing({**columns.numbers, **codes}, y).items():
        what = "the target" if label is None else f"the class {classes[label]!r}"
        warnings.append(
            f"Column {name!r} alone predicts {what} nearly perfectly ({100 * score:.0f}%): is it known before the "
            f"target? If not, give --drop-columns {shlex.quote(name)}."
        )
    return warnings


@dataclass(frozen=True)
class FeatureReader:
    """Reads columns as they look; for the numbers, see `load_table`."""

    table: TableFile
    free_texts: Sequence[str]  # columns that are free text, whatever they look like
    text_features: int
    max_categories: int
    may_leave_out: bool  # whether columns that count or name the rows are left out

    def read(self, names: Sequence[str]) -> FeatureColumns:
        """Read numbers, dates, categories and free text; columns without values are left out."""
        columns = FeatureColumns()
        for name in names:
            column = self.table.column(name)
            if column.null_count == len(column):
                columns.notes.append(f"Column {name!r} holds no value and is left out.")
            elif name not in self.free_texts and (format_ := find_date_format(self.table, name)):
                days = read_dates(self.table, name, format_)
                columns.add_numbers(name, days, bool(np.isnan(days).any()), format_)
            elif is_categorical(column.type):
                self._read_text(columns, name, names)
            elif is_numeric(column.type):
                values = read_numbers(self.table, name)
                if self.may_leave_out and is_index(name, values):
                    columns.notes.append(
                        f"Column {name!r} counts or names the rows and is left out; to use it, name it in "
                        "--set features=..."
                    )
                else:
                    columns.add_numbers(name, values, bool(np.isnan(values).any()))
            else:
                raise DataError(
                    f"{self.table.path}: column {name!r} has the type {column.type}; features must be numbers, "
                    f"true/false, dates or text. Turn it into a number, or {suggest_features(name, names)}"
                )
        if not (columns.numbers or columns.texts or columns.free_texts):
            raise DataError(f"{self.table.path}: no feature column holds any value")
        columns.notes += columns.describe()
        return columns

    def _read_text(self, columns: FeatureColumns, name: str, names: Sequence[str]) -> None:
        values = self.table.values(name)
        if name in self.free_texts:
            columns.add_free_text(name, values, self.text_features)
            return
        check_text_column(self.table, name, values, names)
        present = values[~find_missing(values)]
        n_values = len(set(present.tolist()))
        if n_values <= self.max_categories:
            columns.add_text(name, values)
        elif is_free_text(values):
            columns.add_free_text(name, values, self.text_features)
        elif self.may_leave_out and n_values > ID_SHARE * len(present):
            columns.notes.append(
                f"Column {name!r} has {n_values} different names in {len(present)} rows and is left out; to hash its "
                f"words, give --set text_columns={name}"
            )
        else:
            columns.add_text(name, values)
            columns.group_rare(name, self.max_categories)


def encode_features(
    x: Array, n_numbers: int, train: Sequence[Index], rows: Sequence[Index], scaling: Scaling = "auto"
) -> tuple[Array, list[Array], Scaling]:
    """Fill and standardise the columns of numbers client by client; see `Dataset.encode`.

    A column without any value in the rows of the constants becomes 0; rows of no client become 0.
    """
    out = np.zeros(x.shape, dtype=np.float32)
    numbers = x[:, :n_numbers]
    chosen = choose_scaling(numbers, train) if scaling == "auto" else scaling
    constants = fit_all_constants(numbers, train, chosen)
    for one, every in zip(constants, rows, strict=True):
        out[every, :n_numbers] = standardise(numbers[every], one)
        out[every, n_numbers:] = x[every, n_numbers:]
    return out, constants, chosen


def _choose_features(
    table: TableFile, client_column: str | None, target: str, features: list[str] | str | None
) -> list[str]:
    """Return the feature columns, after a check of all columns that the user names."""
    columns = table.names
    if client_column == target:
        raise ConfigError(f"client_column and target are both {target!r}; they must be two columns")
    if isinstance(features, str):  # one column whose name may hold a comma, or several columns
        features = [features] if features in columns else [name.strip() for name in features.split(",")]
    named = () if client_column is None else (client_column,)
    for name in (*named, target, *(features or ())):
        if name not in columns:
            raise table.lacks(name)
    others = [c for c in columns if c not in (client_column, target) and not c.startswith("__index_level_")]
    feature_names = others if features is None else features
    for name in feature_names:
        if name in (client_column, target):
            raise ConfigError(f"features: column {name!r} is the client column or the target")
    if len(set(feature_names)) < len(feature_names):
        raise ConfigError(f"features: a column is named twice in {', '.join(feature_names)}")
    if not feature_names:
        besides = " and ".join(repr(name) for name in (*named, target))
        raise DataError(f"{table.path} has no feature columns besides {besides}")
    return feature_names
