"""Images in Parquet files, laid out as on the Hugging Face hub."""

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

GREY_MODES = ("1", "L")
"""Pillow's names of modes with one channel of at most 8 bits."""
DECODER = "upright, on white"
"""Changes of decoded images, as a part of cache keys: another text makes new entries."""
UNREADABLE = (OSError, ValueError, SyntaxError)
"""Errors of Pillow for broken files, beside `DecompressionBombError`; a broken PNG is a syntax error."""
ColourMode = Literal["L", "RGB"] | None
"""Grey, coloured, or like the first image."""


class Images(NamedTuple):
    """Decoded images (n, channels, height, width), uint8, with labels (n,), class names and notes."""

    x: Array
    y: Array
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    has_class_names: bool  # False where the files give no names, and the classes are numbers
    owner: Array | None = None  # (n,), the number in `owners` of each image's natural client
    owners: tuple[str, ...] = ()
    known_fingerprint: str = ""  # the fingerprint of x and y, where the cache knows it


def read_images(
    files: Sequence[Path], label: str | None = None, *, owner: str | None = None, mode: ColourMode = None
) -> Images:
    """Decode all images of Parquet files, in order, or read them from the cache.

    The column of the label is by default the one with most classes. `owner` is the column that names each image's
    natural client. `mode` makes all images grey or coloured; by default they become like the first one.
    """
    options = (label, owner, mode)
    return read_cached(files, [*options, *describe_decoder()], lambda: decode_images(files, *options))


def describe_decoder() -> list[str]:
    """Return what decides on pixels, for keys of the cache: two versions of Pillow need not agree on every one."""
    return [version("pillow"), DECODER]


def read_cached(files: Sequence[Path], options: Sequence[Any], make: Callable[[], Images]) -> Images:
    """Return the images that `make` reads from files, from the cache if it has them."""

    def make_entry() -> tuple[dict[str, Array], dict[str, Any]]:
        values = make()._asdict()
        arrays = {key: values[key] for key in ("x", "y", "owner") if values[key] is not None}
        return arrays, {key: values[key] for key in ("classes", "notes", "has_class_names", "owners")}

    try:
        key = "images-" + cache.make_key(files, *options)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror or error}") from error
    entry = cache.read_or_make(key, (("x", "y"), ("owner",)), make_entry)
    about = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.about.items()}
    fields: dict[str, Any] = {**entry.arrays, **about, "known_fingerprint": entry.fingerprints["x,y"]}
    return Images(**fields)


def decode_images(files: Sequence[Path], label: str | None, owner: str | None, mode: ColourMode) -> Images:
    """Decode all images of Parquet files, in order; for the arguments, see `read_images`."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        opened = [parquet.ParquetFile(path) for path in files]
    except (pa.ArrowException, OSError) as error:
        names = ", ".join(str(path) for path in files)
        raise DataError(f"cannot read {names} as Parquet: {str(error).splitlines()[0]}") from error
    image_column, label_column, classes, notes = _find_columns(opened[0].schema_arrow, label, str(files[0]))
    total = sum(file.metadata.num_rows for file in opened)
    if total == 0:
        raise DataError(f"{files[0]}: no rows")
    x: Array | None = None
    labels = []
    owner_names: list[str] = []
    column_names = [image_column, label_column, *([owner] if owner else [])]
    row = 0
    for path, file in zip(files, opened, strict=True):
        for name in column_names:
            if name not in file.schema_arrow.names:
                raise DataError(f"{path} has no column {name!r}; {did_you_mean(name, file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=4096, columns=column_names):
            for name, what in [(label_column, "labels"), *([(owner, "of the images' clients")] if owner else [])]:
                if lacking := batch.column(name).null_count:
                    raise DataError(f"{path}: column {name!r} lacks {lacking} {what}")
            labels.append(np.asarray(batch.column(label_column).to_numpy(zero_copy_only=False)))
            if owner:
                owner_names += map(str, batch.column(owner).to_pylist())
            for data in read_encoded(batch.column(image_column)):
                where = f"row {row} of {image_column!r} in the files from {files[0].name}"
                image = decode_image(data, x, mode, where)
                if x is None:
                    x = np.empty((total, *image.shape), dtype=np.uint8)
                x[row] = image
                row += 1
    assert x is not None
    y = np.concatenate(labels).astype(np.int64)
    images = Images(x, y, classes or tuple(str(k) for k in range(int(y.max()) + 1)), notes, bool(classes))
    if not owner:
        return images
    owners, numbers = np.unique(np.array(owner_names), return_inverse=True)
    return images._replace(owner=numbers, owners=tuple(owners.tolist()))


def read_encoded(column: Any) -> list[bytes | None]:
    """Return the encoded bytes of images, from a column of structs {bytes, path} or a column of bytes."""
    from pyarrow import types

    cells = column.field("bytes") if types.is_struct(column.type) else column
    return list(cells.to_pylist())


def decode_image(
    data: bytes | None, like: Array | None, mode: ColourMode, where: str, size: int | None = None
) -> Array:
    """Decode one image as (channels, height, width), like the images `like` (n, ...) if given, else by `mode`.

    `size` resizes it to this height and width, in pixels.
    """
    from PIL import Image

    if data is None:
        raise DataError(f"{where} holds no image bytes; embed the images in the file")
    try:
        with Image.open(io.BytesIO(data)) as opened:
            is_grey = (mode or opened.mode) in GREY_MODES if like is None else like.shape[1] == 1
            image = read_pixels(turn_upright(opened), where, is_grey, size)
    except (*UNREADABLE, Image.DecompressionBombError) as error:
        raise DataError(f"{where} cannot be decoded as an image: {error}") from error
    if like is not None and image.shape != like.shape[1:]:
        raise DataError(f"{where} has the shape {image.shape}, the first {like.shape[1:]}; all must be alike")
    return image


def turn_upright(image: Any) -> Any:
    """Return an opened image as viewers show it: cameras note beside the pixels how they were held (EXIF)."""
    from PIL.Image import Transpose

    image.load()  # Pillow turns TIFF by itself, and finds the EXIF of some PNG files only now
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_read_orientation(image))
    return image if turn is None else image.transpose(turn)


def read_upright_size(image: Any) -> tuple[int, int]:
    """Return width and height of an opened image once it is upright, without decoding it."""
    # Of TIFF, Pillow gives the upright size; it would decode a PNG file to look for EXIF at its end.
    is_known = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
    width, height = image.size
    return (height, width) if not is_known and _read_orientation(image) in (5, 6, 7, 8) else (width, height)


def _read_orientation(image: Any) -> int:
    """Return the orientation from 1 to 8 of EXIF; 1, upright, if there is none."""
    from PIL.ExifTags import Base

    try:
        return int(image.getexif().get(Base.Orientation, 1))
    except Exception:  # the pixels are good, and broken notes beside them raise many kinds
        return 1


def read_pixels(image: Any, where: str, is_grey: bool | None = None, size: int | None = None) -> Array:
    """Return a PIL image as (channels, height, width), uint8: grey or coloured as told, or else as it is.

    Transparent pixels become white, because drawings often have black below them, too. `size` resizes the image to this
    height and width, in pixels.
    """
    from PIL import Image

    if image.mode[0] in "IF":  # conversion would cut most values to white
        raise DataError(f"{where} has more than 8 bits per channel (mode {image.mode}); convert it to 8 bits")
    mode = "L" if (image.mode in GREY_MODES if is_grey is None else is_grey) else "RGB"
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    converted = image if image.mode == mode else image.convert(mode)
    pixels = np.asarray(converted if size is None else converted.resize((size, size), Image.Resampling.BILINEAR))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _find_columns(schema: Any, label: str | None, where: str) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Find the image column, and the label column: the one that `label` names, or the one with most classes.

    Also return the names of the classes if the file gives them, and notes.
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
    largest = max(classes, key=lambda name: len(classes[name])) if label is None else label
    rivals = [name for name in classes if name != largest and label is None]
    if not rivals:
        return images[0], largest, classes[largest], ()
    if not classes[largest]:
        raise DataError(f"{where}: several columns could be the label; choose one with label: {', '.join(classes)}")
    others = ", ".join(f"{name} ({len(classes[name])} classes)" for name in rivals)
    note = f"Labels are {largest} ({len(classes[largest])} classes); there is also {others}, see option label."
    return images[0], largest, classes[largest], (note,)


def find_image_columns(schema: Any) -> list[str]:
    """Return the columns that the hub calls images, else the columns of structs with encoded bytes."""
    from pyarrow import types

    images = [name for name, feature in _read_hub_features(schema).items() if feature.get("_type") == "Image"]
    return images or [f.name for f in schema if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0]


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
