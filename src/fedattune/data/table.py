"""Tables: CSV or Parquet files with a client column, features and a class to predict."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, did_you_mean
from .dataset import Array, Dataset, Index
from .table_checks import check_text, complete, leave_out, missing, read_target, to_codes
from .table_file import column_values, is_categorical, is_numeric, read_table

MAX_CATEGORIES = 100
NAMED = 10  # columns named in one note
LARGEST = 1e30  # squares of such values leave float32, and no measurement is that large


def table(
    path: Path | str,
    *,
    client_column: str,
    target: str,
    features: list[str] | str | None = None,
) -> Dataset:
    """A CSV or Parquet table whose rows belong to the clients named in one of its columns.

    Features are numbers or categories, by default all other columns (but no index that pandas stored);
    `features` names some, in a list or with commas between. Missing numbers become the median, and all
    numbers are standardised, from each client's own training part only; categories are one-hot.

    Raises:
        DataError: the file cannot be read, or a column cannot be used; the message names it.
        ConfigError: columns that are asked for twice.

    """
    path = Path(path)
    content = read_table(path, client_column, target)
    chosen = _feature_names(path, content.column_names, client_column, target, features)
    owner, owners = to_codes(complete(path, content, client_column, "client").astype(str))
    y, classes = read_target(path, target, complete(path, content, target, "target"))
    numbers, flags, categories = [], [], []  # what the model gets, in this order
    texts = []  # names of the columns that became categories
    notes = [f"Column {client_column!r} names {len(owners)} clients."]
    for name in chosen:
        column = content.column(name)
        if column.null_count == len(column):
            notes.append(f"Column {name!r} holds no value and is left out.")
        elif is_categorical(column.type):
            values = column_values(column)
            check_text(path, name, column.type, values, chosen)
            categories.append(_one_hot(path, name, values, chosen))
            texts.append(name)
            if column.null_count:
                notes.append(
                    f"Column {name!r} lacks {column.null_count} values; they are a category of their own."
                )
        elif is_numeric(column.type):
            values = _numbers(path, name, column)
            gaps = np.isnan(values)
            numbers.append(values)
            if gaps.any():
                flags.append(gaps.astype(np.float64))
                notes.append(
                    f"Column {name!r} lacks {gaps.sum()} values; they become the median of the client's own "
                    "training part, and a further column of 0 and 1 marks them."
                )
        else:
            raise DataError(
                f"{path}: column {name!r} has the type {column.type}; features must be numbers, true/false "
                f"or text. Turn it into a number, or {leave_out(name, chosen)}"
            )
    if not numbers and not categories:
        raise DataError(f"{path}: no feature column holds any value")
    if texts:
        more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
        notes.append(f"Text became categories in {', '.join(map(repr, texts[:NAMED]))}{more}.")
        notes.append(
            "The categories of all rows form one shared list, which every client would have to know."
        )
    if numbers:
        notes.append("Numbers are standardised with mean and deviation of each client's own training part.")
    x = np.column_stack([*numbers, *flags, *categories])
    return Dataset(
        name=path.stem,
        x=x,
        y=y,
        classes=classes,
        owner=owner,
        owners=owners,
        encode=partial(encode, x, len(numbers)),
        notes=tuple(notes),
    )


def encode(x: Array, n_numbers: int, train: Sequence[Index], rows: Sequence[Index]) -> Array:
    """Fill and standardise the first `n_numbers` columns client by client; float32 (n, F).

    A column without any value in a client's training part becomes 0 for that client, as do rows of no client.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    out = np.zeros(x.shape, dtype=np.float32)
    for mine, every in zip(train, rows, strict=True):
        out[every, n_numbers:] = x[every, n_numbers:]
        known = np.flatnonzero(~np.isnan(x[mine, :n_numbers]).all(axis=0))
        if len(known):
            fit = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
            fit.fit(x[np.ix_(mine, known)])
            out[np.ix_(every, known)] = fit.transform(x[np.ix_(every, known)])
    return out


def _feature_names(
    path: Path, columns: list[str], client_column: str, target: str, features: list[str] | str | None
) -> list[str]:
    if client_column == target:
        raise ConfigError(f"client_column and target are both {target!r}; they must be two columns")
    if isinstance(features, str):  # of one column whose name may hold a comma, or several
        features = [features] if features in columns else [name.strip() for name in features.split(",")]
    for name in (client_column, target, *(features or ())):
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
        raise DataError(f"{path} has no feature columns besides {client_column!r} and {target!r}")
    return chosen


def _numbers(path: Path, name: str, column: Any) -> Array:
    numbers: Array = column_values(column).astype(np.float64)
    wrong = np.flatnonzero(np.abs(numbers) > LARGEST)
    if len(wrong):
        raise DataError(
            f"{path}: column {name!r} holds {numbers[wrong[0]]} in data row {wrong[0] + 1}; values must be "
            f"finite and at most {LARGEST:g} in size; mend them or leave them empty"
        )
    return numbers


def _one_hot(path: Path, name: str, values: Array, chosen: Sequence[str]) -> Array:
    """One column per category, float64 (n, categories)."""
    from sklearn.preprocessing import OneHotEncoder

    names = np.where(missing(values), "missing", values)
    n_categories = len(set(names))
    if n_categories > MAX_CATEGORIES:
        raise DataError(
            f"{path}: column {name!r} has {n_categories} categories, more than {MAX_CATEGORIES}; group its "
            f"values, or {leave_out(name, chosen)}"
        )
    return np.asarray(OneHotEncoder(sparse_output=False).fit_transform(names[:, None]))
