"""EMNIST from the IDX files in which it was published, or from Parquet files."""

import gzip
import string
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ..types import Array
from .decode import Images, read_cached, read_images
from .hub import ImageSet, RowSet, check_images, find_image_files, select_files

EmnistSplit = Literal["byclass", "balanced"]

EMNIST_HUB_IDS: dict[EmnistSplit, str] = {
    "byclass": "Royc30ne/emnist-byclass",
    "balanced": "Royc30ne/emnist-balanced",
}
EMNIST_CLASSES: dict[EmnistSplit, tuple[str, ...]] = {
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    # Small letters that look like their capitals are merged with them.
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),
}


def read_emnist(split: EmnistSplit, data_dir: Path | None, rows: RowSet) -> Images:
    """Read the images of one of EMNIST's divisions.

    The IDX files hold every image transposed, so they are turned upright; Parquet files are taken as they are.

    Args:
        split: the division.
        data_dir: folder to look in; by default FEDATTUNE_DATA and the hub.
        rows: the rows to read.

    Raises:
        DataError: the images cannot be found or read, or they are images of another set.

    """
    patterns = (f"emnist-{split}-*-ubyte.gz", f"emnist-{split}-*-ubyte", "*.parquet")
    all_files = find_image_files("emnist", data_dir, patterns, EMNIST_HUB_IDS[split])
    files = select_files("emnist", all_files, rows)
    if files[0].suffix == ".parquet":
        images = read_images(files, mode="L")
    else:
        images = read_cached(files, ["idx", split], lambda: _read_idx_files(files, split))
    check_images("emnist", files[0], images, ImageSet((1, 28, 28), (len(EMNIST_CLASSES[split]),)))
    return images


def _read_idx_files(files: list[Path], split: EmnistSplit) -> Images:
    """Read the images and labels in pairs of files `...-images-idx3-ubyte` and `...-labels-idx1-ubyte`."""
    image_files = [path for path in files if "-images-idx3-" in path.name]
    if not image_files:
        raise DataError(f"{files[0].parent} holds no emnist-{split}-...-images-idx3-ubyte file")
    xs, ys = [], []
    for path in image_files:
        beside = path.with_name(path.name.replace("-images-idx3-", "-labels-idx1-"))
        x, y = read_idx(path, 3), read_idx(beside, 1)
        if len(x) != len(y):
            raise DataError(f"{path} holds {len(x)} images, but {beside.name} {len(y)} labels")
        xs.append(x)
        ys.append(y.astype(np.int64))
    y = np.concatenate(ys)
    if y.max() >= len(EMNIST_CLASSES[split]):
        raise DataError(
            f"{image_files[0].parent} is no part of emnist {split}: it has label {y.max()}, but the "
            f"{len(EMNIST_CLASSES[split])} classes are numbered from 0"
        )
    upright = np.concatenate([x.transpose(0, 2, 1) for x in xs])
    return Images(np.ascontiguousarray(upright)[:, None], y, EMNIST_CLASSES[split], (), has_class_names=True)


def read_idx(path: Path, n_dims: int) -> Array:
    """Read an array of bytes, uint8 of `n_dims` dimensions, from an IDX file, which gzip may have compressed.

    The header is two zeros, 8 for unsigned bytes, the number of dimensions, and each dimension in 4 bytes, the
    highest byte first.

    Raises:
        DataError: there is no such file, or it has another form.

    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    start = 4 + 4 * n_dims
    shape = np.frombuffer(content[4:start].ljust(4 * n_dims, b"\0"), dtype=">u4").astype(np.int64)
    if content[:4] != bytes([0, 0, 8, n_dims]) or len(content) - start != shape.prod() or not shape.prod():
        raise DataError(f"{path} is no IDX file of bytes in {n_dims} dimensions; get it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
