"""Tables: CSV, Parquet or Excel files with a client column, features and a class or number to predict."""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.errors import ConfigError, DataError
from ...core.options import Count
from ..dataset import Dataset
from ..schema import Schema
from ..several_targets import Encoded
from ..types import Array, Index, Scaling
from .by_schema import check_schema_columns, read_schema_features, read_texts, to_text
from .checks import (
    MAX_EXACT,
    TargetType,
    check_text_column,
    encode_values,
    find_empty,
    find_missing,
    find_revealing,
    is_index,
    is_measured,
    number_values,
    read_complete_column,
    read_numbers,
    read_target,
    suggest_features,
)
from .columns import FeatureColumns
from .dates import find_date_format, read_dates, read_times, settle_date_order
from .file import (
    DateOrder,
    TableFile,
    find_stem,
    find_targets,
    is_categorical,
    is_numeric,
    is_plain_text,
    list_columns,
    read_table,
)
from .names import Spellings, describe_spellings, find_spellings, strip_names, unify_spellings
from .number_columns import read_numbers_as_written
from .scaling import fit_all_constants, limit, standardise
from .several_targets import read_schema_targets, read_several_targets, summarize_targets
from .subjects import choose_group_column, find_subjects, is_numbering
from .texts import DEFAULT_MAX_TOKENS, DEFAULT_TEXT_FEATURES, is_free_text
from .written_numbers import is_float

MAX_CATEGORIES = 100
ID_SHARE = 0.5
"""Share of different texts above which a column of short texts names the rows."""
NO_GROUPS = "off"
"""Group column of a table whose rows are split one by one, whatever its columns look like."""


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
    decimal: Literal["auto", ".", ","] = "auto",
    dates: DateOrder = "auto",
    encoding: str = "auto",
    tokens: str | None = None,
    max_tokens: Count = DEFAULT_MAX_TOKENS,
) -> Dataset:
    """A CSV, Parquet or Excel table whose rows belong to the clients named in one of its columns.

    Missing numbers become the median, and all numbers are standardised, by constants of training rows (--scaling).
    Categories are one-hot, the rare ones of many as one. Dates become days, month, weekday and hour, and free text
    hashed words. Numbers may be written as people do: 6,811.50, 22.1 kg, 54%. Columns that count or name the rows, or
    what several rows belong to, are left out, unless `features` names them. Several target columns, with commas
    between, are labels if each holds two values, such as 1 and 0 or yes and no, or else numbers to predict.

    Args:
        schema: columns, categories and classes that all tables of a federation share. Without a schema, the
            content of this table decides.
        client_column: column that names each row's client; None if the rows have no clients of their own.
        features: columns of numbers or categories, in a list or with commas between; by default all other
            columns except an index that pandas stored.
        group_column: column whose equal values stay in one part, such as the patient of several visits; it is no
            feature unless `features` names it. By default a column that looks like one; `off` for none.
        normalize_names: take clients, classes and categories for one if their names differ only in case or blanks.
        client_feature: give the client's name to the model, as one more column of categories.
        target_type: `class` or `number`, or `label` of several columns; `auto` takes fractions, and more than 20
            different numbers, as numbers.
        missing: `impute` fills missing numbers with the median and gives missing text a category; `drop` leaves out
            rows that lack a feature.
        text_columns: columns of free text, in a list or with commas between; by default those with many different
            texts of three words and more.
        max_categories: categories of a column above which the rare ones are grouped.
        decimal: the decimal sign of numbers in text; by default what their cells show.
        dates: `day-first` or `month-first` for dates such as 03/04/2024; by default what a column shows.
        encoding: encoding of a CSV file, such as cp1252; by default Unicode or Windows-1252, as the file is.
        tokens: read the one text column as token numbers, by the tokenizer with this id or folder, or `characters`.

    Raises:
        DataError: the file cannot be read, or a column cannot be used; the message names it.
        ConfigError: a column is named twice, or the schema names other columns.
    """
    keep_blanks = tokens is not None or (schema is not None and bool(schema.tokens))
    table = read_table(Path(path), client_column, target, encoding=encoding, dates=dates, keep_blanks=keep_blanks)
    targets = find_targets(table.names, target)
    is_chosen = features is not None
    if schema is not None:
        features = check_schema_columns(table, schema, target, features)
    feature_names = _choose_features(table, client_column, targets, features, group_column)
    # The client may be a category of a schema; see client_feature.
    _refuse_key_columns(feature_names if schema is None else schema.numbers, client_column, *targets)
    dropped = _read_names(drop_columns, table, "drop_columns")
    feature_names = [name for name in feature_names if name not in dropped]
    notes = list(table.notes)
    if table.signed:
        notes.append(f"A sign such as ? is a missing value in {list_columns(table.signed)}.")
    if dropped:
        notes.append(f"Left out, as --drop-columns says: {list_columns(dropped)}.")
    key_columns = [name for name in (client_column, *targets) if name is not None]
    table = _keep_exact(_drop_incomplete(table, key_columns, notes), key_columns)
    if missing == "drop":
        table = _drop_rows_with_gaps(table, feature_names, notes)
    owner, owners = None, tuple[str, ...]()
    spellings: dict[str, Spellings] = {}
    if client_column is not None:
        names = _read_client_names(table, client_column, normalize_names, spellings)
        owner, owners = encode_values(names)
        notes.append(f"Column {client_column!r} names {len(owners)} clients.")
    keys = {name for name in (client_column, group_column, *targets) if name is not None}
    may_find_groups = group_column is None
    if group_column == NO_GROUPS:
        group_column = None
    if schema is None:
        free = _read_names(text_columns, table, "text_columns")
        if tokens is None:
            others = [name for name in table.names if name not in {*keys, *free}]
            table = settle_date_order(table, others, notes)
            numbers = targets if target_type != "class" else ()  # a class 1,2 is no number
            table = read_numbers_as_written(table, others, decimal, notes, numbers)
        if len(targets) > 1:
            encoded, table = read_several_targets(table, targets, target_type, decimal, notes)
        else:
            labels = read_complete_column(table, target, "target")
            if target_type == "number" or (target_type == "auto" and labels.dtype.kind in "Of" and is_measured(labels)):
                table = read_numbers_as_written(table, [target], decimal, notes)
                labels = read_complete_column(table, target, "target")
            if labels.dtype == object and tokens is None:
                labels, has_blanks = strip_names(labels)
                if has_blanks:
                    notes.append(f"Blanks at the ends of classes are left out in {target!r}.")
                labels = _unify_names(target, labels, normalize_names, spellings)
            encoded = Encoded(*read_target(table, target, labels, target_type))
        y = encoded.y
        subjects, left_out = [], []
        if tokens is not None:
            columns = _read_tokens(table, feature_names, tokens, max_tokens)
        else:
            subjects = _find_subjects(table, [name for name in table.names if name not in {*keys, *free}], owner, y)
            left_out = [] if is_chosen else [name for name in feature_names if name in subjects]
            feature_names = [name for name in feature_names if name not in left_out]
            reader = FeatureReader(
                table, free, text_features, max_categories, normalize_names, may_leave_out=not is_chosen
            )
            columns = reader.read(feature_names, spellings)
            if client_feature and client_column is not None:
                columns.add_text(client_column, names)
                if len(owners) > max_categories:
                    columns.group_rare(client_column, max_categories)
        notes += columns.describe_gaps() + columns.notes + describe_spellings(spellings, normalize_names)
        notes += _warn_of_revealing(columns, encoded)
    else:
        y = read_schema_targets(table, schema)
        encoded = Encoded(y, schema.classes, schema.labels, schema.outputs)
        columns = read_schema_features(table, schema)
        subjects, left_out = _find_subjects(table, [name for name in table.names if name not in keys], owner, y), []
        used = {*feature_names, *keys}
        if strange := [name for name in table.names if name not in used]:
            notes.append(f"The schema does not have the columns {', '.join(strange)}; they are left out.")
        said = [f"{note[0].upper()}{note[1:]}." for note in columns.notes]
        notes += columns.describe_gaps() + said + describe_spellings(spellings, normalize_names)
    found, groups = None, None
    if group_column is not None:
        groups = _read_groups(table.values(group_column))
        notes.append(f"Rows with the same {group_column!r} stay in one part; there are {len(set(groups.tolist()))}.")
    elif may_find_groups and (found := choose_group_column({name: table.values(name) for name in subjects}, owner)):
        groups = _read_groups(table.values(found))
    is_settled = groups is not None or not may_find_groups
    notes += _describe_subjects(table, subjects, left_out, owner, is_settled=is_settled)
    x = columns.matrix()
    return Dataset(
        name=find_stem(table.path),
        x=x,
        y=y,
        classes=encoded.classes,
        owner=owner,
        owners=owners,
        groups=groups,
        found_groups=found,
        encode=partial(encode_features, x, len(columns.numbers)),
        read_times=partial(read_times, table),
        notes=tuple(notes),
        schema=schema or columns.schema(encoded, targets, table.written),
        labels=encoded.labels,
        outputs=encoded.outputs,
    )


def _keep_exact(table: TableFile, names: Sequence[str]) -> TableFile:
    """Read large numbers that name clients or classes as text, because float64 would take several of them for one."""
    from pyarrow import string, types

    for name in names:
        column = table.column(name)
        if types.is_decimal(column.type) and column.type.precision > 15:
            table = table.with_columns({name: column.cast(string())})
        elif table.csv is not None and is_float(column.type):
            values = table.values(name)
            is_whole = bool(np.isfinite(values).all() and (values == np.floor(values)).all())
            if is_whole and np.abs(values).max() >= MAX_EXACT:
                table = table.with_text([name])
    return table


WHOLE_NAME = re.compile(r"(-?\d+)\.0+")


def _read_client_names(table: TableFile, name: str, are_unified: bool, spellings: dict[str, Spellings]) -> Array:
    """Return the name of each row's client as text (n,); 7.0 is 7 if all are such numbers."""
    names = to_text(read_complete_column(table, name, "client"))
    whole = {one: match[1] for one in set(names.tolist()) if (match := WHOLE_NAME.fullmatch(one))}
    if whole and all(one in whole or re.fullmatch(r"-?\d+", one) for one in set(names.tolist())):
        names = np.array([whole.get(one, one) for one in names.tolist()], dtype=object)
    return _unify_names(name, names, are_unified, spellings)


def _unify_names(column: str, values: Array, are_unified: bool, spellings: dict[str, Spellings]) -> Array:
    """Record in `spellings` which texts (n,) differ only in case or blanks, and return them, as one if asked for."""
    if found := find_spellings(values):
        spellings[column] = found
    return unify_spellings(values, found) if are_unified else values


def _read_groups(values: Array) -> Array:
    """Number the different values (n,), int64; each missing value is a group of its own."""
    is_gap = find_missing(values)
    number: dict[Any, int] = {}
    groups = [number.setdefault(value, len(number)) for value in values[~is_gap].tolist()]
    out = np.empty(len(values), dtype=np.int64)
    out[~is_gap] = groups
    out[is_gap] = len(number) + np.arange(int(is_gap.sum()))
    return out


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
        gaps = find_empty(values)
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


def _warn_of_revealing(columns: FeatureColumns, targets: Encoded) -> list[str]:
    """Warn of columns that predict a target nearly perfectly alone: they may not be known in time."""
    codes = {name: number_values(values, columns.categories[name]) for name, values in columns.texts.items()}
    warnings = []
    names = targets.labels or targets.outputs
    each = targets.y.T.astype(np.int64 if targets.labels else np.float32) if names else [targets.y]
    for y, target in zip(each, names or ("",), strict=True):
        for name, (score, label) in find_revealing({**columns.numbers, **codes}, y).items():
            what = f"the target {target!r}" if target else "the target"
            if targets.classes and label is not None:
                what = f"the class {targets.classes[label]!r}"
            warnings.append(
                f"Column {name!r} alone predicts {what} nearly perfectly ({100 * score:.0f}%): is it known before the "
                f"target? If not, give --drop-columns {shlex.quote(name)}."
            )
    return warnings


def _find_subjects(table: TableFile, names: Sequence[str], owner: Array | None, y: Array) -> list[str]:
    columns = {}
    for name in names:
        column = table.column(name)
        is_read = is_numeric(column.type) or is_plain_text(column.type)
        if is_read and column.null_count < len(column) and not name.startswith("__index_level_"):
            columns[name] = table.values(name)
    return find_subjects(columns, summarize_targets(y), owner)


def _describe_index(name: str) -> str:
    return f"Column {name!r} counts or names the rows and is left out; to use it, name it in --set features=..."


def _describe_subjects(
    table: TableFile, subjects: Sequence[str], left_out: Collection[str], owner: Array | None, *, is_settled: bool
) -> list[str]:
    """Say which columns of subjects are no features, and, unless that is settled, how to keep their rows together."""
    notes = []
    for name in subjects:
        values = table.values(name)
        if is_numbering(values, owner):
            notes += [_describe_index(name)] * (name in left_out)
            continue
        n = len(set(values[~find_missing(values)].tolist()))
        said = f"Column {name!r} names what several rows belong to ({n:,} values in {table.n_rows:,} rows)"
        said += " and is left out" * (name in left_out)
        if not is_settled:
            said += (
                f"; rows of one {name!r} may be in training and in test, so results may be too good: to keep them "
                f"together, give --group-column {shlex.quote(name)}"
            )
        notes += [f"{said}."] * (name in left_out or not is_settled)
    return notes


@dataclass(frozen=True)
class FeatureReader:
    """Reads columns as they look; for the numbers, see `load_table`."""

    table: TableFile
    free_texts: Sequence[str]  # columns that are free text, whatever they look like
    text_features: int
    max_categories: int
    normalize_names: bool
    may_leave_out: bool  # whether columns that count or name the rows are left out

    def read(self, names: Sequence[str], spellings: dict[str, Spellings]) -> FeatureColumns:
        """Read numbers, dates, categories and free text; columns without values are left out.

        `spellings` receives categories that differ only in case or blanks.
        """
        columns = FeatureColumns()
        for name in names:
            column = self.table.column(name)
            if column.null_count == len(column):
                columns.notes.append(f"Column {name!r} holds no value and is left out.")
            elif name not in self.free_texts and (format_ := find_date_format(self.table, name)):
                days = read_dates(self.table, name, format_)
                columns.add_numbers(name, days, bool(np.isnan(days).any()), format_)
            elif is_categorical(column.type):
                self._read_text(columns, name, names, spellings)
            elif is_numeric(column.type):
                values = read_numbers(self.table, name)
                if self.may_leave_out and is_index(name, values):
                    columns.notes.append(_describe_index(name))
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

    def _read_text(
        self, columns: FeatureColumns, name: str, names: Sequence[str], spellings: dict[str, Spellings]
    ) -> None:
        values = self.table.values(name)
        if name in self.free_texts:
            columns.add_free_text(name, values, self.text_features)
            return
        if said := check_text_column(self.table, name, names, self.max_categories):
            columns.notes.append(said)
        present = values[~find_missing(values)]
        if len(set(present.tolist())) > self.max_categories and is_free_text(values):
            columns.add_free_text(name, values, self.text_features)
            return
        values = _unify_names(name, strip_names(values)[0], self.normalize_names, spellings)
        n_values = len(set(values.tolist()) - {None})
        if n_values <= self.max_categories:
            columns.add_text(name, values)
        elif self.may_leave_out and n_values > ID_SHARE * len(present):
            columns.notes.append(
                f"Column {name!r} has {n_values} different names in {len(present)} rows and is left out; to hash its "
                f"words, give --set text_columns={name}"
            )
        else:
            columns.add_text(name, values)
            columns.group_rare(name, self.max_categories)


def encode_features(
    x: Array, n_numbers: int, train: Sequence[Index], rows: Sequence[Index], scaling: Scaling
) -> tuple[Array, list[Array], Array]:
    """Fill and standardise the columns of numbers client by client; see `Dataset.encode`.

    A column without a deviation becomes 0; rows of no client become 0.
    """
    out = np.zeros(x.shape, dtype=np.float32)
    numbers = x[:, :n_numbers]
    constants, borrowed = fit_all_constants(numbers, train, scaling)
    for one, every in zip(constants, rows, strict=True):
        out[every, :n_numbers] = limit(standardise(numbers[every], one))
        out[every, n_numbers:] = x[every, n_numbers:]
    return out, constants, borrowed


def _choose_features(
    table: TableFile,
    client_column: str | None,
    targets: Sequence[str],
    features: list[str] | str | None,
    group_column: str | None,
) -> list[str]:
    """Return the feature columns, after a check of all columns that the user names."""
    columns = set(table.names)
    if client_column in targets:
        raise ConfigError(f"client_column and target are both {client_column!r}; they must be two columns")
    if len(set(targets)) < len(targets):
        raise ConfigError(f"target: a column is named twice in {', '.join(targets)}")
    if group_column == NO_GROUPS:
        group_column = None
    if group_column in (client_column, *targets) and group_column is not None:
        raise ConfigError(f"group_column is {group_column!r}, which is the client column or the target already")
    if isinstance(features, str):  # one column whose name may hold a comma, or several columns
        features = [features] if features in columns else [name.strip() for name in features.split(",")]
    named = [name for name in (client_column, *targets, group_column) if name is not None]
    for name in (*named, *(features or ())):
        if name not in columns:
            raise table.lacks(name)
    others = [name for name in table.names if name not in named and not name.startswith("__index_level_")]
    feature_names = others if features is None else features
    if len(set(feature_names)) < len(feature_names):
        raise ConfigError(f"features: a column is named twice in {', '.join(feature_names)}")
    if not feature_names:
        besides = " and ".join(repr(name) for name in named)
        raise DataError(f"{table.path} has no feature columns besides {besides}")
    return feature_names


def _refuse_key_columns(features: Sequence[str], *names: str | None) -> None:
    """Refuse the client column and the target as features that a user names."""
    for name in features:
        if name in names:
            raise ConfigError(f"features: column {name!r} is the client column or the target")
