"""EMNIST from the IDX files in which it was published, or from Parquet files."""

import gzip
import string
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ..types import Array
from .decode import Images, read_cached, read_images
from .hub import RowSet, check_images, find_image_files, select_files

EmnistSplit = Literal["byclass", "balanced"]


EMNIST_HUB_IDS: dict[EmnistSplit, str] = {
    "byclass": "Royc30ne/emnist-byclass",
    "balanced": "Royc30ne/emnist-balanced",
}


EMNIST_CLASSES: dict[
    EmnistSplit, tuple[str, ...]
] = {  # small letters that look like their capitals are merged in balanced
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),
}


def read_emnist(split: EmnistSplit, data_dir: Path | None, rows: RowSet) -> Images:
    """The images of one of EMNIST's divisions, upright.

    The IDX files hold every image transposed, so they are turned; Parquet files are taken as they are.

    Raises:
        DataError: they cannot be found or read, or are those of another set.

    """
    patterns = (f"emnist-{split}-*-ubyte.gz", f"emnist-{split}-*-ubyte", "*.parquet")
    files = select_files(
        "emnist", find_image_files("emnist", data_dir, patterns, EMNIST_HUB_IDS[split]), rows
    )
    parquet = files[0].suffix == ".parquet"
    if parquet:
        images = read_images(files, mode="L")
    else:
        images = read_cached(files, ["idx", split], lambda: _read_idx_files(files, split))
    check_images("emnist", files[0], images, (1, 28, 28), (len(EMNIST_CLASSES[split]),))
    return images


def _read_idx_files(files: list[Path], split: EmnistSplit) -> Images:
    """The images and labels of pairs of files `...-images-idx3-ubyte` and `...-labels-idx1-ubyte`."""
    pictures = [path for path in files if "-images-idx3-" in path.name]
    if not pictures:
        raise DataError(f"{files[0].parent} holds no emnist-{split}-...-images-idx3-ubyte file")
    xs, ys = [], []
    for path in pictures:
        beside = path.with_name(path.name.replace("-images-idx3-", "-labels-idx1-"))
        x, y = read_idx(path, 3), read_idx(beside, 1)
        if len(x) != len(y):
            raise DataError(f"{path} holds {len(x)} images, but {beside.name} {len(y)} labels")
        xs.append(x)
        ys.append(y.astype(np.int64))
    y = np.concatenate(ys)
    if y.max() >= len(EMNIST_CLASSES[split]):
        raise DataError(
            f"{pictures[0].parent} is no part of emnist {split}: it has label {y.max()}, but the "
            f"{len(EMNIST_CLASSES[split])} classes are numbered from 0"
        )
    upright = np.concatenate([x.transpose(0, 2, 1) for x in xs])
    return Images(np.ascontiguousarray(upright)[:, None], y, EMNIST_CLASSES[split], (), has_class_names=True)


def read_idx(path: Path, n_dims: int) -> Array:
    """The array of bytes, uint8 of `n_dims` dimensions, in an IDX file, which may be compressed with gzip.

    Its header is two zeros, 8 for unsigned bytes, the number of dimensions, and each of them in 4 bytes, the
    highest first.

    Raises:
        DataError: no such file, or not of this form.

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
