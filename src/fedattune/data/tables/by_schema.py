"""Read a table with the schema that all tables of a federation share, and find what does not fit it."""

from pathlib import Path

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean, list_some
from ..schema import MISSING_CATEGORY, OTHER_CATEGORY, Names, Schema
from ..types import Array
from .checks import find_empty, find_missing, number_values, read_complete_column, read_numbers, read_target
from .columns import FeatureColumns
from .dates import read_dates
from .file import MAX_NAMED_COLUMNS, TableFile, find_targets, is_categorical, is_numeric, read_table
from .names import match_spellings
from .written_numbers import is_float, to_numbers

ADD_OR_RENAME = "; add it, or rename the column that holds it"
"""Advice on a missing column."""


TRUE_WORDS = ("1", "true", "yes", "y", "t", "positive", "present")
FALSE_WORDS = ("0", "false", "no", "n", "f", "negative", "absent")
"""The cells of a label that is true or false; upper and lower case count alike."""


def read_label(values: Array) -> Array | None:
    """Return cells (n,) as true or false; None if they are others."""
    if values.dtype == bool:
        return values
    texts = [str(text).strip().lower() for text in to_text(values).tolist()]
    is_label = set(texts) <= {*TRUE_WORDS, *FALSE_WORDS}
    return np.array([text in TRUE_WORDS for text in texts], dtype=bool) if is_label else None


def read_schema_target(table: TableFile, name: str, schema: Schema) -> Array:
    """Return the number of each row's class in a schema, int64 (n,); without classes, the target, float32 (n,).

    Of a column that is one of several labels, return whether it is true, bool (n,).
    """
    values = read_complete_column(table, name, "target")
    if schema.labels:
        if (label := read_label(values)) is None:
            row = next(row for row in range(len(values)) if read_label(values[row : row + 1]) is None)
            raise DataError(
                f"{table.path}: target column {name!r} holds {str(values[row])!r} in data row {table.data_row(row)}, "
                "and the schema says that it is a label; expected 1 or 0, true or false, yes or no"
            )
        return label
    if not schema.classes:
        return read_target(table, name, read_schema_numbers(table, schema, name), "number")[0]
    return _number_classes(table, name, read_class_names(table, name, schema.classes), schema.classes)


def read_class_names(table: TableFile, name: str, classes: Names) -> Array:
    """Read a column of classes as text (n,), None where missing; what is no class counts as the file has it: 01."""
    from pyarrow import types

    column = table.column(name)
    is_truth = types.is_boolean(column.type)
    texts = to_text(np.array(column.to_pylist(), dtype=object) if is_truth else table.values(name))
    if table.csv is not None and is_numeric(column.type) and not is_truth:
        is_strange = number_values(texts, classes) < 0
        if is_strange.any():
            texts = np.where(is_strange, table.with_text([name], ()).values(name), texts)
    texts[find_empty(texts)] = None
    return texts


def _number_classes(table: TableFile, name: str, texts: Array, classes: Names) -> Array:
    texts, _ = match_spellings(texts, classes)
    _check_values(table, f"target column {name!r}", texts, classes, "class")
    return number_values(texts, classes)


def check_schema_columns(table: TableFile, schema: Schema, target: str, features: list[str] | str | None) -> list[str]:
    """Return the feature columns that a schema asks for; the user may name no `features`."""
    if not schema.columns:
        raise ConfigError(f"{table.path}: the schema names no columns; a table needs one with numbers or categories")
    if features is not None:
        raise ConfigError("features: the schema names the features already; leave this option out")
    if target != schema.target and tuple(find_targets(table.names, target)) != schema.target_columns:
        raise ConfigError(f"target is {target!r}, but the schema says {schema.target!r}; give the target of the schema")
    known = set(table.names)
    for column in (*schema.columns, *schema.target_columns):
        if column not in known:
            raise table.lacks(column, ", which the schema asks for", ADD_OR_RENAME)
    return list(schema.columns)


def read_schema_features(table: TableFile, schema: Schema, *, is_prediction: bool = False) -> FeatureColumns:
    """Read the features that a schema asks for.

    A prediction takes what training did not have, with a note: missing numbers in columns that the schema does not
    flag, and unknown categories.
    """
    columns = FeatureColumns(grouped=tuple(filter(schema.has_group, schema.categories)))
    for name in schema.numbers:
        format_ = schema.dates.get(name)
        values = read_schema_numbers(table, schema, name) if format_ is None else read_dates(table, name, format_)
        gaps = np.flatnonzero(np.isnan(values))
        if len(gaps) and name not in schema.flagged and not is_prediction:
            raise DataError(
                f"{table.path}: column {name!r} lacks {len(gaps)} of {len(values)} values, the first in data row "
                f"{table.data_row(gaps[0])}, but the schema does not flag it; fill them in, or give all nodes a schema "
                f"that has {name!r} in `flagged`"
            )
        columns.add_numbers(name, values, name in schema.flagged, format_)
    for name, n_features in schema.texts.items():
        columns.add_free_text(name, to_text(table.values(name)), n_features)
    for name, tokenizer in schema.tokens.items():
        columns.add_tokens(name, read_texts(table, name), tokenizer, schema.max_tokens or 1)
    for name, categories in schema.categories.items():
        texts, respelt = match_spellings(_read_schema_texts(table, name, categories), categories)
        raw = texts
        if respelt:
            listed = list_some([f"{one!r} as {known!r}" for one, known in sorted(respelt.items())], 3)
            columns.notes.append(f"column {name!r}: {listed} taken, which differ only in case or blanks")
        if schema.has_group(name):
            known = {*categories, *([None] if MISSING_CATEGORY in categories else [])}
            texts = np.array([one if one in known else OTHER_CATEGORY for one in texts.tolist()], dtype=object)
        if is_prediction:
            texts, notes = _take_unknown(name, raw, texts, categories, has_group=schema.has_group(name))
            columns.notes += notes
        columns.add_text(name, texts, categories)
        if not is_prediction:
            _check_values(table, f"column {name!r}", columns.texts[name], categories, "category")
    return columns


def read_schema_numbers(table: TableFile, schema: Schema, name: str) -> Array:
    """Read a column of which the schema says that it holds numbers, float64 (n,), NaN where missing."""
    column = table.column(name)
    if column.null_count == len(column):
        return np.full(len(column), np.nan)
    if table.csv is not None and schema.decimals.get(name) == "," and is_float(column.type):
        # Pyarrow has taken the thousands of 1.234 for decimals.
        table = table.with_text([name], ())
        column = table.column(name)
    if is_numeric(column.type):
        return read_numbers(table, name)
    if not is_categorical(column.type):
        raise DataError(
            f"{table.path}: column {name!r} has the type {column.type}, but the schema says that it holds numbers; "
            "store them as numbers"
        )
    return to_numbers(
        f"{table.path}: column {name!r}",
        table.values(name),
        schema.decimals.get(name),
        schema.units.get(name, ""),
        "correct that cell or leave it empty",
        "but the schema says that it holds numbers",
        data_row=table.data_row,
    )


def _read_schema_texts(table: TableFile, name: str, categories: Names) -> Array:
    """Read a column of which the schema says that it holds text (n,), None where missing; 01 stays 01."""
    column = table.column(name)
    if table.csv is not None and (column.null_count or not is_categorical(column.type)):
        # Pyarrow has taken 01 and true for other types, and a category called NA for a missing value.
        table = table.with_text([name], categories)
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
    return to_text((table.with_text([name]) if table.csv is not None else table).values(name))


def to_text(values: Array) -> Array:
    """Turn values (n,) into text: whole numbers without a decimal point, None where missing."""
    texts = [
        None if gap else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value, gap in zip(values.tolist(), find_missing(values).tolist(), strict=True)
    ]
    return np.array(texts, dtype=object)


def _check_values(table: TableFile, where: str, values: Array, allowed: Names, kind: str) -> None:
    """Refuse values that the schema does not know; `kind` says what the values are, such as "class"."""
    strange = set(values.tolist()) - set(allowed)
    if not strange:
        return
    row = next(row for row, value in enumerate(values.tolist()) if value in strange)
    is_gap = kind == "category" and values[row] == MISSING_CATEGORY
    others = sorted(map(repr, strange - {values[row]}))
    more = f"; nor does it have {list_some(others, MAX_NAMED_COLUMNS)}" if others else ""
    raise DataError(
        f"{table.path}: {where} holds {'no value' if is_gap else repr(values[row])} in data row "
        f"{table.data_row(row)}, which is no {kind} of the schema; {did_you_mean(values[row], allowed)}; correct the "
        f"cell, or give all nodes a schema with it{more}"
    )


def _take_unknown(
    name: str, raw: Array, texts: Array, categories: Names, *, has_group: bool
) -> tuple[Array, list[str]]:
    """Give unknown categories the place that training gave them, and say so.

    They count as `other` if training grouped its rare categories (`has_group`; `texts` has that already, and `raw` has
    the cells), or else as `missing` if training had that. In any other column they stay as they are, and all inputs of
    the column become 0.
    """
    is_gap = find_missing(raw)
    strange = sorted(set(raw[~is_gap].tolist()) - set(categories))
    has_missing = MISSING_CATEGORY in categories
    if has_group:
        fate = f"count as {OTHER_CATEGORY!r}, as in training"
    elif has_missing:
        fate = f"count as {MISSING_CATEGORY!r}"
        texts = np.array([None if one in strange else one for one in texts.tolist()], dtype=object)
    else:
        fate = "count as none of the known categories, which training never had; look at their predictions with care"
    notes = []
    if strange:
        n_rows = sum(one in strange for one in raw.tolist())
        notes.append(
            f"column {name!r} holds {list_some([repr(one) for one in strange], 3)} in {n_rows} of {len(raw)} rows, "
            f"no category of the model (known: {', '.join(categories)}); such rows {fate}"
        )
    if is_gap.any() and not has_missing:
        notes.append(
            f"column {name!r} lacks {int(is_gap.sum())} of {len(raw)} values, though none was missing in training; "
            f"such rows {fate}"
        )
    return texts, notes


def find_table_problems(path: Path, schema: Schema, *, client_column: str | None, target: str) -> list[str]:
    """Compare every column of a table with a schema; return one sentence for each problem, which says what to do."""
    try:
        table = read_table(path, client_column, target, keep_blanks=bool(schema.tokens))
    except DataError as error:
        return [str(error)]
    problems = []
    targets = find_targets(table.names, target)
    for name in (*schema.columns, *targets, *([client_column] if client_column is not None else [])):
        try:
            if name not in table.names:
                raise table.lacks(name, advice=ADD_OR_RENAME)
            if name == client_column:
                read_complete_column(table, name, "client")
            elif name in targets:
                problems += _find_target_problems(table, schema, name)
            else:
                read_schema_features(table, _select_column(schema, name))
        except DataError as error:
            problems.append(str(error))
    return problems


def _find_target_problems(table: TableFile, schema: Schema, name: str) -> list[str]:
    """Find missing values of the target, and values that are no class of the schema."""
    try:
        read_schema_target(table, name, schema)
    except DataError as error:
        problems = [str(error)]
    else:
        return []
    is_gap = find_empty(table.values(name))
    if schema.classes and is_gap.any() and not is_gap.all():
        texts = read_class_names(table, name, schema.classes)
        texts[is_gap] = schema.classes[0]  # these are reported already
        try:
            _number_classes(table, name, texts, schema.classes)
        except DataError as error:
            problems.append(str(error))
    return problems


def _select_column(schema: Schema, name: str) -> Schema:
    """Return the schema of one feature column."""
    lists = {key: tuple({name} & set(getattr(schema, key))) for key in ("numbers", "flagged")}
    tables = {
        key: {one: value for one, value in getattr(schema, key).items() if one == name}
        for key in ("categories", "dates", "texts", "tokens")
    }
    return schema.model_copy(update={**lists, **tables})
