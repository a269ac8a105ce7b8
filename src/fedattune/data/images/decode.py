"""Image sets in Parquet files as the Hugging Face hub lays them out."""

import io
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...core.errors import DataError, did_you_mean
from .. import cache
from ..types import Array

ColourMode = Literal["L", "RGB"] | None


class Images(NamedTuple):
    """Decoded images (n, channels, height, width), uint8, with labels (n,), class names and notes.

    Where a column names the natural client of each image, `owner` is its number, (n,), in `owners`.
    """

    x: Array
    y: Array
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    has_class_names: bool  # whether the files give the classes' names; else these are numbers
    owner: Array | None = None
    owners: tuple[str, ...] = ()
    known_fingerprint: str = ""  # the fingerprint of x and y, if it is known


class ImageColumns(NamedTuple):
    """Which columns hold image and label, the names of the classes if they are known, and notes."""

    image: str
    label: str
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def read_images(
    files: Sequence[Path], label: str | None = None, *, owner: str | None = None, mode: ColourMode = None
) -> Images:
    """Decode all images of the files, in order, or read them from the cache.

    `owner` is the column that names each image's natural client. All become grey ("L") or coloured ("RGB") as
    `mode` says, else as the first one is.

    Raises:
        DataError: a file cannot be read, has no image or label column, or images differ in shape.

    """
    return read_cached(
        files,
        [label, owner, mode, version("pillow")],
        lambda: decode_images(files, label, owner=owner, mode=mode),
    )


def read_cached(files: Sequence[Path], what: Sequence[Any], make: Callable[[], Images]) -> Images:
    """The images that `make` reads from the files, or those that were kept in the cache when it did so before.

    `what` is all that they depend on beside the files: such as Pillow's version, for two decoders of JPEG need not
    agree on every pixel.

    Raises:
        DataError: a file cannot be read.

    """
    try:
        key = "images-" + cache.make_key(files, *what)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror or error}") from error
    groups = (("x", "y"), ("owner",))
    entry = cache.read_entry(key, groups)
    if entry is None:
        images = make()
        arrays = {"x": images.x, "y": images.y} | ({} if images.owner is None else {"owner": images.owner})
        rest = {name: getattr(images, name) for name in ("classes", "notes", "has_class_names", "owners")}
        entry = cache.write_entry(key, arrays, groups, rest)
    about = entry.about
    return Images(
        entry.arrays["x"],
        entry.arrays["y"],
        tuple(about["classes"]),
        tuple(about["notes"]),
        bool(about["has_class_names"]),
        entry.arrays.get("owner"),
        tuple(about["owners"]),
        entry.prints["x,y"],
    )


def decode_images(
    files: Sequence[Path], label: str | None = None, *, owner: str | None = None, mode: ColourMode = None
) -> Images:
    """Decode all images of the Parquet files, in order."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        opened = [parquet.ParquetFile(path) for path in files]
    except (pa.ArrowException, OSError) as error:
        names = ", ".join(str(path) for path in files)
        raise DataError(f"cannot read {names} as Parquet: {str(error).splitlines()[0]}") from error
    columns = find_columns(opened[0].schema_arrow, label, str(files[0]))
    total = sum(file.metadata.num_rows for file in opened)
    if total == 0:
        raise DataError(f"{files[0]}: no rows")
    x: Array | None = None
    labels = []
    holders: list[str] = []
    wanted = [columns.image, columns.label, *([owner] if owner else [])]
    row = 0
    for path, file in zip(files, opened, strict=True):
        for name in wanted:
            if name not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column {name!r}; {did_you_mean(name, file.schema_arrow.names)}"
                )
        for batch in file.iter_batches(batch_size=4096, columns=wanted):
            labels.append(_read_labels(batch.column(columns.label), f"{path}: column {columns.label!r}"))
            if owner:
                holders += _read_owners(batch.column(owner), f"{path}: column {owner!r}")
            for data in read_encoded(batch.column(columns.image)):
                where = f"row {row} of {columns.image!r} in the files from {files[0].name}"
                image = decode_image(data, x, mode, where)
                if x is None:
                    x = np.empty((total, *image.shape), dtype=np.uint8)
                x[row] = image
                row += 1
    assert x is not None
    y = np.concatenate(labels).astype(np.int64)
    classes = columns.classes or tuple(str(k) for k in range(int(y.max()) + 1))
    if not owner:
        return Images(x, y, classes, columns.notes, bool(columns.classes))
    owners, numbers = np.unique(np.array(holders), return_inverse=True)
    return Images(x, y, classes, columns.notes, bool(columns.classes), numbers, tuple(owners.tolist()))


def _read_labels(column: Any, where: str) -> Array:
    if column.null_count:
        raise DataError(f"{where} lacks {column.null_count} labels")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _read_owners(column: Any, where: str) -> list[str]:
    if column.null_count:
        raise DataError(f"{where} lacks {column.null_count} of the images' clients")
    return [str(name) for name in column.to_pylist()]


def read_encoded(column: Any) -> list[bytes | None]:
    """The images' encoded bytes, from a struct {bytes, path} or a column of bytes."""
    from pyarrow import types

    held = column.field("bytes") if types.is_struct(column.type) else column
    return list(held.to_pylist())


def decode_image(data: bytes | None, like: Array | None, mode: ColourMode, where: str) -> Array:
    """One image as (channels, height, width), grey or RGB as `mode` says, else as the first one is."""
    from PIL import Image, UnidentifiedImageError

    if data is None:
        raise DataError(f"{where} holds no image bytes; embed the images in the file")
    try:
        with Image.open(io.BytesIO(data)) as opened:
            grey = (mode or opened.mode) in ("1", "L") if like is None else like.shape[1] == 1
            wanted = "L" if grey else "RGB"
            pixels = np.asarray(opened if opened.mode == wanted else opened.convert(wanted))
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise DataError(f"{where} cannot be decoded as an image: {error}") from error
    image = pixels[None] if grey else pixels.transpose(2, 0, 1)
    if like is not None and image.shape != like.shape[1:]:
        raise DataError(f"{where} has the shape {image.shape}, the first {like.shape[1:]}; all must be alike")
    return image


def find_columns(schema: Any, label: str | None, where: str) -> ImageColumns:
    """Find the image column and the label column of a Parquet file.

    Among several label columns, the function takes the one with most classes, unless `label` names another.

    Args:
        schema: pyarrow's schema of the file.
        label: name of the label column, if the user gives one.
        where: name of the file in messages.

    Raises:
        DataError: no column fits, or several columns could be meant.

    """
    from pyarrow import types

    images = find_image_columns(schema)
    classes = find_label_columns(schema) or {f.name: () for f in schema if types.is_integer(f.type)}
    if len(images) != 1:
        raise DataError(f"{where}: expected one image column, found {', '.join(images) or 'none'}")
    if label is not None and label not in classes:
        raise DataError(f"{where}: {label!r} is no label column; {did_you_mean(label, classes)}")
    if not classes:
        raise DataError(f"{where}: no label column of whole numbers")
    if label is not None:
        return ImageColumns(images[0], label, classes[label], ())
    most = max(classes, key=lambda name: len(classes[name]))
    rivals = [name for name in classes if name != most]
    if not rivals:
        return ImageColumns(images[0], most, classes[most], ())
    if not classes[most]:
        raise DataError(
            f"{where}: several columns could be the label; choose one with label: {', '.join(classes)}"
        )
    others = ", ".join(f"{name} ({len(classes[name])} classes)" for name in rivals)
    note = f"Labels are {most} ({len(classes[most])} classes); there is also {others}, see option label."
    return ImageColumns(images[0], most, classes[most], (note,))


def find_image_columns(schema: Any) -> list[str]:
    """Return the columns that the hub calls images, else those of structs with encoded bytes."""
    from pyarrow import types

    images = [name for name, feature in _read_hub_features(schema).items() if feature.get("_type") == "Image"]
    return images or [
        f.name for f in schema if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0
    ]


def find_label_columns(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the columns that the hub calls labels, each with the names of its classes."""
    return {
        name: tuple(map(str, feature.get("names") or ()))
        for name, feature in _read_hub_features(schema).items()
        if feature.get("_type") == "ClassLabel"
    }


def _read_hub_features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features that the hub's library `datasets` has noted in a schema, or nothing."""
    try:
        content = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = content["info"]["features"]
        return {name: f for name, f in features.items() if isinstance(f, dict) and name in schema.names}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
