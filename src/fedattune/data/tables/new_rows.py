"""Rows to predict for, read as a model's schema says."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import DataError
from ..images.decode import decode_image, find_image_columns, find_label_columns, read_encoded
from ..schema import Schema
from ..types import Array
from .by_schema import ADD_OR_RENAME, read_class_names, read_schema_features, read_schema_numbers
from .checks import MAX_EXACT, number_values
from .file import TABLE_SUFFIXES, TableFile, find_suffix, is_categorical, is_numeric, list_columns, read_table
from .names import match_spellings
from .scaling import standardise
from .several_targets import read_known_targets

TARGET_NAMES = ("label", "target")
"""Names of the class column in tables for models that know no names of columns."""


class NewRows(NamedTuple):
    """Samples (n, *input_shape), float32, int64 or uint8; their targets, or None; and notes.

    Targets are classes (n,), -1 where unknown, numbers (n,), or labels or numbers (n, parts), NaN where unknown.
    """

    x: Array
    y: Array | None
    notes: list[str]


def read_rows(path: Path, schema: Schema, constants: Array | None) -> NewRows:
    """Read the rows of a table as samples for a model.

    A model that was trained on a table finds its columns by their names. For any other model, the table has one
    column of numbers per value of a sample, in their order. A Parquet table may have one column of encoded images.
    The client's constants (3, K) standardise the numbers; they are None if the schema has no columns.
    """
    if find_suffix(path) is None:
        raise DataError(f"{path}: expected a table that ends in {', '.join(TABLE_SUFFIXES)}")
    table = read_table(path, None, schema.target, keep_blanks=bool(schema.tokens))
    if schema.columns:
        assert constants is not None
        return _read_table_rows(table, schema, constants)
    images = find_image_columns(table.content.schema)
    if images and len(schema.input_shape) == 3:
        return _read_image_rows(table, schema, images)
    return _read_number_rows(table, schema)


def _read_table_rows(table: TableFile, schema: Schema, constants: Array) -> NewRows:
    """Read the columns that the schema names."""
    known = set(table.names)
    lacking = [name for name in schema.columns if name not in known]
    if lacking:
        more = f" (nor {', '.join(map(repr, lacking[1:]))})" if len(lacking) > 1 else ""
        raise table.lacks(lacking[0], f"{more}, which the model needs", ADD_OR_RENAME)
    notes = [*_describe_file(table), *_note_unused(table, (*schema.columns, *schema.target_columns))]
    columns = read_schema_features(table, schema, is_prediction=True)
    notes += columns.notes
    for (name, values), median in zip(columns.numbers.items(), constants[0], strict=True):
        n_missing = int(np.isnan(values).sum())
        if np.isnan(median):
            notes.append(f"column {name!r} held no value or a single one in training, and is not looked at")
        elif n_missing:
            new = "" if name in schema.flagged else ", though none was missing in training"
            notes.append(
                f"column {name!r} lacks {n_missing} of {len(values)} values; they become {median:g}, the "
                f"middle of the training rows{new}"
            )
    x, k = columns.matrix(), len(schema.numbers)
    x[:, :k] = standardise(x[:, :k], constants)
    if schema.labels or schema.outputs:
        return NewRows(x.astype(np.float32), read_known_targets(table, schema), notes)
    target = schema.target or ""
    y = _read_classes(table, target, schema, notes) if target in table.names else None
    return NewRows(x.astype(np.float32), y, notes)


def _read_number_rows(table: TableFile, schema: Schema) -> NewRows:
    """Read one column of numbers for each value of a sample."""
    target = next((name for name in TARGET_NAMES if name in table.names), None)
    names = [name for name in table.names if name != target and is_numeric(table.column(name).type)]
    n_values = math.prod(schema.input_shape)
    if len(names) != n_values:
        images = "; or give a Parquet file with one column of images" if len(schema.input_shape) == 3 else ""
        raise DataError(
            f"{table.path} has {len(names)} columns of numbers{f' beside {target!r}' if target else ''}, and the "
            f"model needs {n_values}, one for each value of a sample of shape {schema.input_shape}, in their order"
            f"{images}"
        )
    notes = [*_describe_file(table), *_note_unused(table, (*names, target or ""))]
    shape = f"samples of shape {schema.input_shape}"
    notes.append(f"the columns {names[0]!r} to {names[-1]!r} are taken as they stand, as {shape}")
    dtype = np.float64 if schema.input_type == "int64" else np.float32  # float32 rounds whole numbers above 2**24
    with np.errstate(over="ignore"):  # reported just below
        x = np.column_stack([table.values(name).astype(dtype) for name in names])
    wrong = np.argwhere(~np.isfinite(x))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{table.path}: column {names[column]!r} holds no finite number in data row {row + 1}; the model knows no "
            "value to put in its place; correct the cell"
        )
    if schema.input_type == "int64":
        wrong = np.argwhere((x != np.floor(x)) | (np.abs(x) >= MAX_EXACT))
        if len(wrong):
            row, column = wrong[0]
            raise DataError(
                f"{table.path}: column {names[column]!r} holds {x[row, column]:g} in data row {row + 1}, and the model "
                "takes whole numbers below 2**53; correct the cell"
            )
        x = x.astype(np.int64)
    y = _read_classes(table, target, schema, notes) if target and not schema.has_parts else None
    return NewRows(x.reshape(len(x), *schema.input_shape), y, notes)


def _read_image_rows(table: TableFile, schema: Schema, images: list[str]) -> NewRows:
    """Read a column of encoded images."""
    if len(images) > 1:
        raise DataError(f"{table.path} has several columns of images, {', '.join(images)}; keep one of them")
    shape, where = schema.input_shape, f"{table.path}: column {images[0]!r}"
    if shape[0] not in (1, 3):
        raise DataError(f"{where} holds images, and the model needs samples of shape {shape}")
    x = np.empty((table.content.num_rows, *shape), dtype=np.uint8)
    encoded = [cell for chunk in table.column(images[0]).chunks for cell in read_encoded(chunk)]
    for row, cell in enumerate(encoded):
        image = decode_image(cell, None, "L" if shape[0] == 1 else "RGB", f"{where}, data row {row + 1}")
        if image.shape != shape:
            raise DataError(
                f"{where} holds an image of shape {image.shape} in data row {row + 1}, and the model needs {shape}; "
                "scale or crop it"
            )
        x[row] = image
    notes: list[str] = []
    labels = find_label_columns(table.content.schema)
    known = [name for name, names in labels.items() if names == schema.classes]
    target = next((name for name in (*known, *TARGET_NAMES) if name in table.names), None)
    y = None
    if target and not schema.has_parts:
        y = _read_classes(table, target, schema, notes, labels.get(target, ()))
    return NewRows(x, y, notes)


def _read_classes(
    table: TableFile, target: str, schema: Schema, notes: list[str], names: Sequence[str] = ()
) -> Array | None:
    """Return the number of each row's class (n,), -1 where it is missing or none of the model's.

    Without classes, the target is a number: return the numbers (n,), NaN where missing.
    """
    kind, classes = table.column(target).type, schema.classes
    if not classes:
        try:
            return read_schema_numbers(table, schema, target)
        except DataError as error:
            notes.append(f"no errors are measured: {error}")
            return None
    if not (is_categorical(kind) or is_numeric(kind)):
        return None
    if names and is_numeric(kind):
        numbers = np.nan_to_num(table.values(target).astype(np.float64), nan=-1).astype(np.int64)
        numbers = np.where((numbers >= 0) & (numbers < len(names)), numbers, -1)
        texts = np.array([*names, None], dtype=object)[numbers]
    else:
        texts, _ = match_spellings(read_class_names(table, target, classes), classes)
    y = number_values(texts, classes)
    strange = sorted({str(text) for text in texts[y < 0].tolist() if text is not None})
    if strange:
        notes.append(
            f"column {target!r} holds {strange[0]!r}, which is no class of the model (known: {', '.join(classes)}); "
            "such rows do not count in the accuracy"
        )
    return y


def _describe_file(table: TableFile) -> list[str]:
    return [f"{note[0].lower()}{note[1:].rstrip('.')}" for note in table.notes]


def _note_unused(table: TableFile, names: Sequence[str]) -> list[str]:
    used = set(names)
    others = [name for name in table.names if name not in used]
    return [f"not used: the column{'s' * (len(others) > 1)} {list_columns(others)}"] if others else []
