"""Images in folders: one folder per class, and around these one folder per client where the clients are known."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ...core.errors import DataError, did_you_mean, list_some
from ...core.options import Count, write_option
from ..dataset import Dataset
from ..schema import Schema
from ..types import Array
from . import build_image_dataset
from .decode import (
    GREY_MODES,
    UNREADABLE,
    ColourMode,
    Images,
    decode_image,
    describe_decoder,
    read_cached,
    read_upright_size,
)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of the files that count as images, as in torchvision's `ImageFolder`."""
PART_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Names of folders that hold parts of the data, not clients."""
MAX_NAMED = 3
"""Files that one message or note names."""


class ImageFile(NamedTuple):
    """An image, with its class and its client, None in a folder of classes alone."""

    path: Path
    label: str
    client: str | None


def load_image_folder(
    path: Path,
    schema: Schema | None = None,
    *,
    image_size: Count | None = None,
    scaling: Literal["half", "unit"] = "unit",
) -> Dataset:
    """Images in files CLIENT/CLASS/*.png or, for data to be divided, CLASS/*.png (also .jpg and others).

    Classes are the names of the folders of all clients together, in sorted order. Where some images are coloured, grey
    ones become coloured. Photos are turned upright as their EXIF says, and what is transparent becomes white.

    Args:
        path: the folder.
        schema: classes, channels and size that all nodes of a federation share; without a schema, the images decide.
        image_size: resize every image to this width and height, in pixels; by default all must have one size.
        scaling: turn bytes into the model's input: `half` scales from -1 to 1, `unit` from 0 to 1.

    Raises:
        DataError: no images, folders of another depth, or images of different sizes; the message names the files.
    """
    files, left_out = find_image_files(path)
    classes = _find_classes(path, files, schema)
    owners = tuple(sorted({file.client for file in files if file.client is not None}))
    mode: ColourMode = None
    if schema is not None:
        mode = "L" if schema.input_shape[0] == 1 else "RGB"

    def decode() -> Images:
        x, notes = _decode(path, files, image_size, mode)
        y = np.array([classes.index(file.label) for file in files], dtype=np.int64)
        owner = np.array([owners.index(file.client) for file in files if file.client is not None], dtype=np.int64)
        return Images(x, y, classes, notes, True, owner if owners else None, owners)

    places = [file.path.relative_to(path).as_posix() for file in files]
    options = ["folder", places, classes, image_size, mode, *describe_decoder()]
    images = read_cached([file.path for file in files], options, decode)
    notes = (*images.notes, *_describe_left_out(path, left_out))
    return build_image_dataset(path.resolve().name, images._replace(notes=notes), scaling)


def find_image_files(root: Path) -> tuple[list[ImageFile], list[Path]]:
    """Find the images in a folder, in sorted order, and what else is there: other files, and folders without images.

    Raises:
        DataError: there are none, or not all are at root/CLIENT/CLASS/ or at root/CLASS/.
    """
    files, left_out = list[ImageFile](), list[Path]()
    try:
        for path, names in _walk(root, ()):
            if names is None or path.suffix.lower() not in IMAGE_SUFFIXES:
                left_out.append(path)
            elif len(names) not in (1, 2):
                raise DataError(
                    f"{path} is {len(names)} folders deep in {root}, expected {root}/CLIENT/CLASS/{path.name} or "
                    f"{root}/CLASS/{path.name}; move it"
                )
            else:
                files.append(ImageFile(path, names[-1], names[0] if len(names) == 2 else None))
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if not files:
        raise DataError(
            f"{root} holds no images; expected files such as {root}/CLIENT/CLASS/1.png "
            f"(or {', '.join(IMAGE_SUFFIXES[1:])})"
        )
    both = {file.client is None: file.path for file in files}
    if len(both) == 2:
        raise DataError(
            f"{both[True]} is in a folder of a class, and {both[False]} in one of a client and a class; put all images "
            f"into {root}/CLIENT/CLASS/, or all into {root}/CLASS/"
        )
    if found := [file.client for file in files if file.client and file.client.lower() in PART_NAMES]:
        raise DataError(
            f"{root} has the folder {found[0]!r} where clients are expected; give the folder of one part, such as "
            f"{root}/{found[0]}, which is divided into parts anew, or rename that client"
        )
    return files, left_out


def _walk(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...] | None]]:
    """List the files in a folder, each with the folders around it; None for what is hidden, and for empty folders."""
    inside = sorted(folder.iterdir())
    if not inside and names:
        yield folder, None
    for path in inside:
        if path.name.startswith("."):
            yield path, None
        elif path.is_dir() and len(names) < 4:  # deeper ones may be links in a circle
            yield from _walk(path, (*names, path.name))
        else:
            yield path, names


def _find_classes(root: Path, files: Sequence[ImageFile], schema: Schema | None) -> tuple[str, ...]:
    found = sorted({file.label for file in files})
    if schema is None:
        if len(found) == 1:
            raise DataError(f"{root}: all images are of the class {found[0]!r}; a model needs two classes or more")
        return tuple(found)
    if strange := [label for label in found if label not in schema.classes]:
        raise DataError(
            f"{root}: the folder {strange[0]!r} is no class of the schema; {did_you_mean(strange[0], schema.classes)}"
        )
    return schema.classes


def _decode(
    root: Path, files: Sequence[ImageFile], size: int | None, mode: ColourMode
) -> tuple[Array, tuple[str, ...]]:
    """Decode images as (n, channels, height, width), in the given mode or by the most colourful image, with notes."""
    from PIL import Image

    shapes: dict[tuple[int, int], Path] = {}
    n_grey = 0
    for path, *_ in files:
        try:
            with Image.open(path) as opened:
                shapes.setdefault(read_upright_size(opened), path)
                n_grey += opened.mode in GREY_MODES
        except (*UNREADABLE, Image.DecompressionBombError) as error:
            raise DataError(f"{path} cannot be read as an image: {error}; correct or delete it") from error
    if len(shapes) > 1 and size is None:
        (one, first), (other, second), *_ = shapes.items()
        raise DataError(
            f"{first} has {one[0]}x{one[1]} pixels and {second} {other[0]}x{other[1]}; give "
            f"{write_option('image_size')} to resize all images, such as {min(*one, *other)}"
        )
    is_mixed = mode is None and 0 < n_grey < len(files)
    chosen = mode or ("L" if n_grey == len(files) else "RGB")
    x: Array | None = None
    for row, (path, *_) in enumerate(files):
        image = decode_image(path.read_bytes(), x, chosen, str(path), size)
        if x is None:
            x = np.empty((len(files), *image.shape), dtype=np.uint8)
        x[row] = image
    assert x is not None
    note = f"{n_grey} of the {len(files)} images in {root.name} are grey and become coloured like the others."
    return x, (note,) * is_mixed


def _describe_left_out(root: Path, left_out: Sequence[Path]) -> tuple[str, ...]:
    if not left_out:
        return ()
    names = [path.relative_to(root).as_posix() for path in left_out]
    verb = "is no image or holds none" if len(names) == 1 else "are no images or hold none"
    return (
        f"{len(names)} of the files and folders in {root.name} {verb}, and left out: {list_some(names, MAX_NAMED)}.",
    )
