"""Rows to predict for, read as a model's schema says."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import DataError, did_you_mean
from ..images.decode import decode_image, read_encoded, read_hub_features
from ..schema import MISSING_CATEGORY, Schema
from ..types import Array
from . import MAX_NAMED_COLUMNS
from .checks import find_missing
from .columns import check_known, encode_one_hot, read_schema_numbers, read_schema_texts, to_text
from .file import NO_COLUMN, TABLE_SUFFIXES, column_to_numpy, is_categorical, is_numeric, read_table
from .scaling import standardise

TARGET_NAMES = ("label", "target")
"""What the column with the class is called in tables for models that know no names of columns."""


class NewRows(NamedTuple):
    """Samples (n, *input_shape), float32 or uint8, their classes (n,), -1 where not known, or None; and notes."""

    x: Array
    y: Array | None
    notes: list[str]


def read_rows(path: Path, schema: Schema, constants: Array | None) -> NewRows:
    """The rows of a table as samples: numbers are standardised by the client's `constants` (3, K).

    For a model that was trained on a table, columns are found by their names. For any other, the table has one column
    of numbers for each value of a sample, in their order, or, in Parquet, one of encoded images.

    Raises:
        DataError: the table cannot be read, lacks a column, or holds what the model does not know.

    """
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(f"{path}: expected a table that ends in {', '.join(TABLE_SUFFIXES)}")
    content = read_table(path, NO_COLUMN, schema.target or NO_COLUMN)
    if schema.columns:
        assert constants is not None
        return _read_table_rows(path, content, schema, constants)
    features = read_hub_features(content.schema)
    images = [name for name in content.column_names if _holds_images(content.schema.field(name), features)]
    if images and len(schema.input_shape) == 3:
        return _read_image_rows(path, content, schema, images, features)
    return _read_number_rows(path, content, schema)


def _read_table_rows(path: Path, content: Any, schema: Schema, constants: Array) -> NewRows:
    known = content.column_names
    lacking = [name for name in schema.columns if name not in known]
    if lacking:
        more = f" (nor {', '.join(map(repr, lacking[1:]))})" if len(lacking) > 1 else ""
        raise DataError(
            f"{path} has no column {lacking[0]!r}{more}, which the model needs; {did_you_mean(lacking[0], known)}; add "
            "it, or rename the column that holds it"
        )
    notes = _note_unused(known, (*schema.columns, schema.target or ""))
    numbers = {name: read_schema_numbers(path, name, content.column(name)) for name in schema.numbers}
    for (name, values), median in zip(numbers.items(), constants[0], strict=True):
        gaps = int(np.isnan(values).sum())
        if np.isnan(median):
            notes.append(f"column {name!r} held no value in the client's training part, and is not looked at")
        elif gaps:
            new = "" if name in schema.flagged else ", though none was missing in training"
            notes.append(
                f"column {name!r} lacks {gaps} of {len(values)} values; they become the client's median {median:g}{new}"
            )
    flags = [np.isnan(values) for name, values in numbers.items() if name in schema.flagged]
    hot = []
    for name, categories in schema.categories.items():
        values = read_schema_texts(path, name, content.column(name), categories)
        values = np.where(find_missing(values), MISSING_CATEGORY, values)
        advice = "mend the cell: the model knows no other"
        check_known(path, f"column {name!r}", values, categories, "category", advice)
        hot.append(encode_one_hot(values, categories))
    raw = np.column_stack(list(numbers.values())) if numbers else np.empty((content.num_rows, 0))
    x = np.column_stack([standardise(raw, constants), *flags, *hot]).astype(np.float32)
    y = None
    if schema.target in known:
        y = _read_classes(content.column(schema.target), schema.classes, schema.target or "", notes)
    return NewRows(x, y, notes)


def _read_number_rows(path: Path, content: Any, schema: Schema) -> NewRows:
    """One column of numbers for each value of a sample."""
    known = content.column_names
    target = next((name for name in TARGET_NAMES if name in known), None)
    names = [name for name in known if name != target and is_numeric(content.column(name).type)]
    wanted = math.prod(schema.input_shape)
    if len(names) != wanted:
        images = " or a Parquet file with one column of images" if len(schema.input_shape) == 3 else ""
        raise DataError(
            f"{path} has {len(names)} columns of numbers{f' beside {target!r}' if target else ''}, and the model needs "
            f"{wanted}, one for each value of a sample of shape {schema.input_shape}, in their order{images}"
        )
    notes = _note_unused(known, (*names, target or ""))
    notes.append(
        f"the columns {names[0]!r} to {names[-1]!r} are taken as they stand, as samples of shape {schema.input_shape}"
    )
    with np.errstate(over="ignore"):  # reported just below
        x = np.column_stack([column_to_numpy(content.column(name)).astype(np.float32) for name in names])
    wrong = np.argwhere(~np.isfinite(x))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{path}: column {names[column]!r} holds no finite number in data row {row + 1}; the model knows no value "
            "to put in its place; mend the cell"
        )
    y = _read_classes(content.column(target), schema.classes, target, notes) if target else None
    return NewRows(x.reshape(len(x), *schema.input_shape), y, notes)


def _read_image_rows(
    path: Path, content: Any, schema: Schema, images: list[str], features: dict[str, Any]
) -> NewRows:
    """A column of encoded images."""
    if len(images) > 1:
        raise DataError(f"{path} has several columns of images, {', '.join(images)}; leave one of them there")
    shape, where = schema.input_shape, f"{path}: column {images[0]!r}"
    x = np.empty((content.num_rows, *shape), dtype=np.uint8)
    if shape[0] not in (1, 3):
        raise DataError(f"{where} holds images, and the model needs samples of shape {shape}")
    encoded = [cell for chunk in content.column(images[0]).chunks for cell in read_encoded(chunk)]
    for row, cell in enumerate(encoded):
        image = decode_image(cell, None, "L" if shape[0] == 1 else "RGB", f"{where}, data row {row + 1}")
        if image.shape != shape:
            raise DataError(
                f"{where} holds an image of shape {image.shape} in data row {row + 1}, and the model needs {shape}; "
                "scale or crop it"
            )
        x[row] = image
    notes: list[str] = []
    labels = {
        name: tuple(map(str, feature.get("names") or ()))
        for name, feature in features.items()
        if feature.get("_type") == "ClassLabel"
    }
    target = next((name for name, its in labels.items() if its == schema.classes), None)
    target = target or next((name for name in TARGET_NAMES if name in content.column_names), None)
    if target is None:
        return NewRows(x, None, notes)
    column = content.column(target)
    if labels.get(target) and is_numeric(column.type):  # numbers, which stand for names
        names = np.array([*labels[target], None], dtype=object)
        numbers = np.nan_to_num(column_to_numpy(column).astype(np.float64), nan=-1).astype(np.int64)
        numbers = np.where((numbers >= 0) & (numbers < len(names) - 1), numbers, -1)
        return NewRows(x, _number_classes(names[numbers], schema.classes, target, notes), notes)
    return NewRows(x, _read_classes(column, schema.classes, target, notes), notes)


def _holds_images(field: Any, features: dict[str, Any]) -> bool:
    from pyarrow import types

    if features.get(field.name, {}).get("_type") == "Image":
        return True
    return bool(types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)


def _read_classes(column: Any, classes: Sequence[str], target: str, notes: list[str]) -> Array | None:
    """The number of each row's class; -1 where that is missing or none of the model's."""
    if not (is_categorical(column.type) or is_numeric(column.type)):
        return None
    return _number_classes(to_text(column_to_numpy(column)), classes, target, notes)


def _number_classes(texts: Array, classes: Sequence[str], target: str, notes: list[str]) -> Array:
    number = {name: k for k, name in enumerate(classes)}
    y = np.array([number.get(text, -1) for text in texts.tolist()], dtype=np.int64)
    strange = sorted({str(text) for text in texts[y < 0].tolist() if text is not None})
    if strange:
        notes.append(
            f"column {target!r} holds {strange[0]!r}, which is no class of the model (known: {', '.join(classes)}); "
            "such rows do not count in the accuracy"
        )
    return y


def _note_unused(known: Sequence[str], used: Sequence[str]) -> list[str]:
    others = [name for name in known if name not in used]
    more = f" and {len(others) - MAX_NAMED_COLUMNS} more" if len(others) > MAX_NAMED_COLUMNS else ""
    listed = ", ".join(map(repr, others[:MAX_NAMED_COLUMNS])) + more
    return [f"not used: the column{'s' * (len(others) > 1)} {listed}"] if others else []
