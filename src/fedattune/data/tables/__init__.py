"""Tables: CSV or Parquet files with a client column, features and a class to predict."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean
from ..dataset import Dataset
from ..schema import Schema
from ..types import Array, Index
from .checks import (
    check_text_column,
    encode_values,
    read_complete_column,
    read_numbers,
    read_target,
    suggest_features,
)
from .columns import FeatureColumns, check_schema_columns, encode_one_hot, read_labels, read_schema_features
from .file import NO_COLUMN, column_to_numpy, is_categorical, is_numeric, read_table
from .scaling import fit_constants, standardise

MAX_CATEGORIES = 100


MAX_NAMED_COLUMNS = 10  # columns named in one note


def load_table(
    path: Path | str,
    schema: Schema | None = None,
    *,
    client_column: str | None,
    target: str,
    features: list[str] | str | None = None,
) -> Dataset:
    """A CSV or Parquet table whose rows belong to the clients named in one of its columns.

    Features are numbers or categories, by default all other columns (but no index that pandas stored);
    `features` names some, in a list or with commas between. Missing numbers become the median, and all
    numbers are standardised, from each client's own training part only; categories are one-hot.

    A `schema` fixes columns, categories and classes instead, so that tables that nobody has side by side get
    the same features. Where `client_column` is None, the rows have no clients of their own.

    Raises:
        DataError: the file cannot be read, or a column cannot be used; the message names it.
        ConfigError: columns that are asked for twice, or otherwise than the schema has them.

    """
    path = Path(path)
    content = read_table(path, NO_COLUMN if client_column is None else client_column, target)
    if schema is not None:
        features = check_schema_columns(path, content.column_names, schema, target, features)
    chosen = _choose_features(path, content.column_names, client_column, target, features)
    owner, owners, notes = None, tuple[str, ...](), list[str]()
    if client_column is not None:
        owner, owners = encode_values(
            read_complete_column(path, content, client_column, "client").astype(str)
        )
        notes.append(f"Column {client_column!r} names {len(owners)} clients.")
    labels = read_complete_column(path, content, target, "target")
    if schema is None:
        y, classes = read_target(path, target, labels)
        found = _infer_features(path, content, chosen)
    else:
        y, classes = read_labels(path, target, labels, schema.classes), schema.classes
        found = read_schema_features(path, content, schema)
        strange = [name for name in content.column_names if name not in (*chosen, client_column, target)]
        if strange:
            notes.append(f"The schema does not have the columns {', '.join(strange)}; they are left out.")
    notes += found.notes
    if found.numbers:
        notes.append("Numbers are standardised with mean and deviation of each client's own training part.")
    flags = [np.isnan(found.numbers[name]).astype(np.float64) for name in found.flagged]
    hot = [encode_one_hot(values, found.categories[name]) for name, values in found.texts.items()]
    x = np.column_stack([*found.numbers.values(), *flags, *hot])
    return Dataset(
        name=path.stem,
        x=x,
        y=y,
        classes=classes,
        owner=owner,
        owners=owners,
        encode=partial(encode_features, x, len(found.numbers)),
        notes=tuple(notes),
        schema=schema or found.schema(classes, target),
    )


def _infer_features(path: Path, content: Any, chosen: Sequence[str]) -> FeatureColumns:
    """The features as the columns look: numbers, or text and then categories; empty ones are left out."""
    found = FeatureColumns()
    for name in chosen:
        column = content.column(name)
        if column.null_count == len(column):
            found.notes.append(f"Column {name!r} holds no value and is left out.")
        elif is_categorical(column.type):
            values = column_to_numpy(column)
            check_text_column(path, name, column.type, values, chosen)
            found.add_text(name, values)
            if len(found.categories[name]) > MAX_CATEGORIES:
                raise DataError(
                    f"{path}: column {name!r} has {len(found.categories[name])} categories, more than "
                    f"{MAX_CATEGORIES}; group its values, or {suggest_features(name, chosen)}"
                )
        elif is_numeric(column.type):
            values = read_numbers(path, name, column)
            found.add_numbers(name, values, flagged=bool(np.isnan(values).any()))
        else:
            raise DataError(
                f"{path}: column {name!r} has the type {column.type}; features must be numbers, true/false "
                f"or text. Turn it into a number, or {suggest_features(name, chosen)}"
            )
    if not found.numbers and not found.categories:
        raise DataError(f"{path}: no feature column holds any value")
    texts = list(found.texts)
    if texts:
        more = f" and {len(texts) - MAX_NAMED_COLUMNS} more" if len(texts) > MAX_NAMED_COLUMNS else ""
        found.notes.append(
            f"Text became categories in {', '.join(map(repr, texts[:MAX_NAMED_COLUMNS]))}{more}."
        )
        found.notes.append(
            "The categories of all rows form one shared list, which every client would have to know."
        )
    return found


def encode_features(
    x: Array, n_numbers: int, train: Sequence[Index], rows: Sequence[Index]
) -> tuple[Array, list[Array]]:
    """Fill and standardise the first `n_numbers` columns client by client.

    Returns float32 (n, F) and the constants of each client, float64 (3, n_numbers). A column without any value in a
    client's training part becomes 0 for that client, as do rows of no client.
    """
    out = np.zeros(x.shape, dtype=np.float32)
    constants = []
    for mine, every in zip(train, rows, strict=True):
        constants.append(fit_constants(x[mine, :n_numbers]))
        out[every, :n_numbers] = standardise(x[every, :n_numbers], constants[-1])
        out[every, n_numbers:] = x[every, n_numbers:]
    return out, constants


def _choose_features(
    path: Path,
    columns: list[str],
    client_column: str | None,
    target: str,
    features: list[str] | str | None,
) -> list[str]:
    if client_column == target:
        raise ConfigError(f"client_column and target are both {target!r}; they must be two columns")
    if isinstance(features, str):  # of one column whose name may hold a comma, or several
        features = [features] if features in columns else [name.strip() for name in features.split(",")]
    named = () if client_column is None else (client_column,)
    for name in (*named, target, *(features or ())):
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}; {did_you_mean(name, columns)}")
    others = [c for c in columns if c not in (client_column, target) and not c.startswith("__index_level_")]
    chosen = others if features is None else features
    for name in chosen:
        if name in (client_column, target):
            raise ConfigError(f"features: column {name!r} is the client column or the target")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"features: a column is named twice in {', '.join(chosen)}")
    if not chosen:
        besides = " and ".join(repr(name) for name in (*named, target))
        raise DataError(f"{path} has no feature columns besides {besides}")
    return chosen
