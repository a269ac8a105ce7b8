"""Rows to predict for, read as a model's schema says."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, did_you_mean
from .dataset import Array
from .images import _encoded, _hub_features, _image
from .preparation import standardised
from .schema import MISSING, Schema
from .table import NAMED, NO_COLUMN
from .table_checks import missing
from .table_columns import _as_text, _check_known, _numbers, _texts, one_hot
from .table_file import SUFFIXES, column_values, is_categorical, is_numeric, read_table

TARGETS = ("label", "target")
"""What the column with the class is called in tables for models that know no names of columns."""


class Rows(NamedTuple):
    """Samples (n, *input_shape), float32 or uint8, their classes (n,), -1 where not known, or None; and notes."""

    x: Array
    y: Array | None
    notes: list[str]


def read_rows(path: Path, schema: Schema, constants: Array | None) -> Rows:
    """The rows of a table as samples: numbers are standardised by the client's `constants` (3, K).

    For a model that was trained on a table, columns are found by their names. For any other, the table has one column
    of numbers for each value of a sample, in their order, or, in Parquet, one of encoded images.

    Raises:
        DataError: the table cannot be read, lacks a column, or holds what the model does not know.

    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: expected a table that ends in {', '.join(SUFFIXES)}")
    content = read_table(path, NO_COLUMN, schema.target or NO_COLUMN)
    if schema.columns:
        assert constants is not None
        return _of_table(path, content, schema, constants)
    features = _hub_features(content.schema)
    images = [name for name in content.column_names if _holds_images(content.schema.field(name), features)]
    if images and len(schema.input_shape) == 3:
        return _of_images(path, content, schema, images, features)
    return _of_numbers(path, content, schema)


def _of_table(path: Path, content: Any, schema: Schema, constants: Array) -> Rows:
    known = content.column_names
    lacking = [name for name in schema.columns if name not in known]
    if lacking:
        more = f" (nor {', '.join(map(repr, lacking[1:]))})" if len(lacking) > 1 else ""
        raise DataError(
            f"{path} has no column {lacking[0]!r}{more}, which the model needs; {did_you_mean(lacking[0], known)}; add "
            "it, or rename the column that holds it"
        )
    notes = _unused(known, (*schema.columns, schema.target or ""))
    numbers = {name: _numbers(path, name, content.column(name)) for name in schema.numbers}
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
        values = _texts(path, name, content.column(name), categories)
        values = np.where(missing(values), MISSING, values)
        advice = "mend the cell: the model knows no other"
        _check_known(path, f"column {name!r}", values, categories, "category", advice)
        hot.append(one_hot(values, categories))
    raw = np.column_stack(list(numbers.values())) if numbers else np.empty((content.num_rows, 0))
    x = np.column_stack([standardised(raw, constants), *flags, *hot]).astype(np.float32)
    y = None
    if schema.target in known:
        y = _classes(content.column(schema.target), schema.classes, schema.target or "", notes)
    return Rows(x, y, notes)


def _of_numbers(path: Path, content: Any, schema: Schema) -> Rows:
    """One column of numbers for each value of a sample."""
    known = content.column_names
    target = next((name for name in TARGETS if name in known), None)
    names = [name for name in known if name != target and is_numeric(content.column(name).type)]
    wanted = math.prod(schema.input_shape)
    if len(names) != wanted:
        images = " or a Parquet file with one column of images" if len(schema.input_shape) == 3 else ""
        raise DataError(
            f"{path} has {len(names)} columns of numbers{f' beside {target!r}' if target else ''}, and the model needs "
            f"{wanted}, one for each value of a sample of shape {schema.input_shape}, in their order{images}"
        )
    notes = _unused(known, (*names, target or ""))
    notes.append(
        f"the columns {names[0]!r} to {names[-1]!r} are taken as they stand, as samples of shape {schema.input_shape}"
    )
    with np.errstate(over="ignore"):  # reported just below
        x = np.column_stack([column_values(content.column(name)).astype(np.float32) for name in names])
    wrong = np.argwhere(~np.isfinite(x))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{path}: column {names[column]!r} holds no finite number in data row {row + 1}; the model knows no value "
            "to put in its place; mend the cell"
        )
    y = _classes(content.column(target), schema.classes, target, notes) if target else None
    return Rows(x.reshape(len(x), *schema.input_shape), y, notes)


def _of_images(path: Path, content: Any, schema: Schema, images: list[str], features: dict[str, Any]) -> Rows:
    """A column of encoded images."""
    if len(images) > 1:
        raise DataError(f"{path} has several columns of images, {', '.join(images)}; leave one of them there")
    shape, where = schema.input_shape, f"{path}: column {images[0]!r}"
    x = np.empty((content.num_rows, *shape), dtype=np.uint8)
    if shape[0] not in (1, 3):
        raise DataError(f"{where} holds images, and the model needs samples of shape {shape}")
    encoded = [cell for chunk in content.column(images[0]).chunks for cell in _encoded(chunk)]
    for row, cell in enumerate(encoded):
        image = _image(cell, None, "L" if shape[0] == 1 else "RGB", f"{where}, data row {row + 1}")
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
    target = target or next((name for name in TARGETS if name in content.column_names), None)
    if target is None:
        return Rows(x, None, notes)
    column = content.column(target)
    if labels.get(target) and is_numeric(column.type):  # numbers, which stand for names
        names = np.array([*labels[target], None], dtype=object)
        numbers = np.nan_to_num(column_values(column).astype(np.float64), nan=-1).astype(np.int64)
        numbers = np.where((numbers >= 0) & (numbers < len(names) - 1), numbers, -1)
        return Rows(x, _numbered(names[numbers], schema.classes, target, notes), notes)
    return Rows(x, _classes(column, schema.classes, target, notes), notes)


def _holds_images(field: Any, features: dict[str, Any]) -> bool:
    from pyarrow import types

    if features.get(field.name, {}).get("_type") == "Image":
        return True
    return bool(types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)


def _classes(column: Any, classes: Sequence[str], target: str, notes: list[str]) -> Array | None:
    """The number of each row's class; -1 where that is missing or none of the model's."""
    if not (is_categorical(column.type) or is_numeric(column.type)):
        return None
    return _numbered(_as_text(column_values(column)), classes, target, notes)


def _numbered(texts: Array, classes: Sequence[str], target: str, notes: list[str]) -> Array:
    number = {name: k for k, name in enumerate(classes)}
    y = np.array([number.get(text, -1) for text in texts.tolist()], dtype=np.int64)
    strange = sorted({str(text) for text in texts[y < 0].tolist() if text is not None})
    if strange:
        notes.append(
            f"column {target!r} holds {strange[0]!r}, which is no class of the model (known: {', '.join(classes)}); "
            "such rows do not count in the accuracy"
        )
    return y


def _unused(known: Sequence[str], used: Sequence[str]) -> list[str]:
    others = [name for name in known if name not in used]
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    listed = ", ".join(map(repr, others[:NAMED])) + more
    return [f"not used: the column{'s' * (len(others) > 1)} {listed}"] if others else []
