"""Tables: CSV or Parquet files with a client column, features and a class to predict."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean
from ..dataset import Dataset
from ..schema import Schema
from ..types import Array, Index, Scaling
from .checks import (
    TargetType,
    check_text_column,
    encode_values,
    read_complete_column,
    read_numbers,
    read_target,
    suggest_features,
)
from .columns import FeatureColumns, check_schema_columns, read_labels, read_schema_features
from .file import NO_COLUMN, TableFile, is_categorical, is_numeric, list_columns, read_table
from .scaling import choose_scaling, fit_all_constants, standardise

MAX_CATEGORIES = 100


def load_table(
    path: Path | str,
    schema: Schema | None = None,
    *,
    client_column: str | None,
    target: str,
    features: list[str] | str | None = None,
    target_type: TargetType = "auto",
) -> Dataset:
    """A CSV or Parquet table whose rows belong to the clients named in one of its columns.

    Missing numbers become the median, and all numbers are standardised, by constants of training rows (--scaling).
    Categories are one-hot.

    Args:
        path: the file.
        schema: columns, categories and classes that all tables of a federation share. Without a schema, the
            content of this table decides.
        client_column: column that names each row's client; None if the rows have no clients of their own.
        target: column of the class.
        features: columns of numbers or categories, in a list or with commas between; by default all other
            columns except an index that pandas stored.
        target_type: `class` or `number`; `auto` takes fractions, and more than 20 different numbers, as numbers.

    Raises:
        DataError: the file cannot be read, or a column cannot be used; the message names it.
        ConfigError: a column is named twice, or the schema names other columns.

    """
    table = read_table(Path(path), NO_COLUMN if client_column is None else client_column, target)
    if schema is not None:
        features = check_schema_columns(table, schema, target, features)
    feature_names = _choose_features(table, client_column, target, features)
    owner, owners, notes = None, tuple[str, ...](), list[str]()
    if client_column is not None:
        owner, owners = encode_values(read_complete_column(table, client_column, "client").astype(str))
        notes.append(f"Column {client_column!r} names {len(owners)} clients.")
    labels = read_complete_column(table, target, "target")
    if schema is None:
        y, classes = read_target(table.path, target, labels, target_type)
        columns = _infer_features(table, feature_names)
    else:
        y, classes = read_labels(table.path, target, labels, schema.classes), schema.classes
        columns = read_schema_features(table, schema)
        strange = [name for name in table.names if name not in (*feature_names, client_column, target)]
        if strange:
            notes.append(f"The schema does not have the columns {', '.join(strange)}; they are left out.")
    notes += columns.notes
    x = columns.matrix()
    return Dataset(
        name=table.path.stem,
        x=x,
        y=y,
        classes=classes,
        owner=owner,
        owners=owners,
        encode=partial(encode_features, x, len(columns.numbers)),
        notes=tuple(notes),
        schema=schema or columns.schema(classes, target),
    )


def _infer_features(table: TableFile, names: Sequence[str]) -> FeatureColumns:
    """Read columns as they look: numbers, or text and then categories; columns without values are left out."""
    columns = FeatureColumns()
    for name in names:
        column = table.column(name)
        if column.null_count == len(column):
            columns.notes.append(f"Column {name!r} holds no value and is left out.")
        elif is_categorical(column.type):
            values = table.values(name)
            check_text_column(table, name, values, names)
            columns.add_text(name, values)
            if len(columns.categories[name]) > MAX_CATEGORIES:
                raise DataError(
                    f"{table.path}: column {name!r} has {len(columns.categories[name])} categories, more than "
                    f"{MAX_CATEGORIES}; group its values, or {suggest_features(name, names)}"
                )
        elif is_numeric(column.type):
            values = read_numbers(table, name)
            columns.add_numbers(name, values, is_flagged=bool(np.isnan(values).any()))
        else:
            raise DataError(
                f"{table.path}: column {name!r} has the type {column.type}; features must be numbers, true/false "
                f"or text. Turn it into a number, or {suggest_features(name, names)}"
            )
    if not columns.numbers and not columns.categories:
        raise DataError(f"{table.path}: no feature column holds any value")
    if columns.texts:
        columns.notes += [
            f"Text became categories in {list_columns(list(columns.texts))}.",
            "The categories of all rows form one shared list, which every client would have to know.",
        ]
    return columns


def encode_features(
    x: Array, n_numbers: int, train: Sequence[Index], rows: Sequence[Index], scaling: Scaling = "auto"
) -> tuple[Array, list[Array], Scaling]:
    """Fill and standardise the columns of numbers client by client.

    Args:
        x: features (n, F), NaN where numbers are missing.
        n_numbers: number K of columns of numbers, which come first.
        train: training rows of each client.
        rows: all rows of each client.
        scaling: rows whose constants standardise the numbers.

    Returns:
        The features, float32 (n, F), each client's constants, float64 (3, K), and the scaling, which `auto` chose. A
        column without any value in the rows of the constants becomes 0; rows of no client become 0.

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
            raise DataError(f"{table.path} has no column {name!r}; {did_you_mean(name, columns)}")
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
