"""The image sets known by name, from a local folder or the Hugging Face hub."""

import gzip
import os
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ...core.errors import DataError
from ..types import Array
from .decode import ColourMode, Images, read_cached, read_images

RowSet = Literal["all", "train"]
"""The training and test images of a set, or its training images only."""


class ImageSet(NamedTuple):
    """Id on the Hugging Face hub, shape of the images, possible numbers of classes, and the mode to decode in."""

    hub_id: str
    shape: tuple[int, ...]
    n_classes: tuple[int, ...]
    mode: ColourMode = None


IMAGE_SETS = {
    "mnist": ImageSet("ylecun/mnist", (1, 28, 28), (10,)),
    "fashion_mnist": ImageSet("zalando-datasets/fashion_mnist", (1, 28, 28), (10,)),
    "cifar10": ImageSet("uoft-cs/cifar10", (3, 32, 32), (10,)),
    "cifar100": ImageSet("uoft-cs/cifar100", (3, 32, 32), (100, 20)),
    "emnist": ImageSet("Royc30ne/emnist-byclass", (1, 28, 28), (62, 47)),
    "femnist": ImageSet("flwrlabs/femnist", (1, 28, 28), (62,), "L"),
    "tiny_imagenet": ImageSet("zh-plus/tiny-imagenet", (3, 64, 64), (200,), "RGB"),  # some of its files are grey
}
HUB_IDS = {name: one.hub_id for name, one in IMAGE_SETS.items()}
MNIST_CLASSES = tuple("0123456789")


def read_known_images(
    name: str, data_dir: Path | None, label: str | None, *, rows: RowSet = "all", owner: str | None = None
) -> Images:
    """Read the images of a set, and check that they are what the name says; `owner` is the column of the clients."""
    image_set = IMAGE_SETS[name]
    files = _find_image_files(name, data_dir, rows)
    images = read_images(files, label, owner=owner, mode=image_set.mode)
    _check_images(name, files[0], images, image_set)
    is_twin = name in ("mnist", "fashion_mnist")  # they have one shape, but different names of classes
    if is_twin and images.has_class_names and (images.classes == MNIST_CLASSES) != (name == "mnist"):
        raise DataError(
            f"{files[0]} is no part of {name}: its classes are {', '.join(images.classes[:3])}, ...; give the "
            f"folder of {name}, or the name of these data"
        )
    return images


def _check_images(name: str, file: Path, images: Images, image_set: ImageSet) -> None:
    """Refuse images of another shape, or of another number of classes, than those of the set."""
    shape, n = images.x.shape[1:], len(images.classes)
    if shape != image_set.shape or n not in image_set.n_classes:
        raise DataError(
            f"{file} is no part of {name}: expected images of shape {image_set.shape} in "
            f"{' or '.join(map(str, image_set.n_classes))} classes, got shape {shape} and {n} classes; give the folder "
            f"of {name}, or the name of these data"
        )


def _find_image_files(
    name: str, data_dir: Path | None, rows: RowSet, patterns: tuple[str, ...] = ("*.parquet",), repo: str | None = None
) -> list[Path]:
    """Find the files of a set's rows, training rows first: those of the first pattern that has any.

    The places are `data_dir`/name and `data_dir`; without `data_dir`, the same two in FEDATTUNE_DATA, then the hub.
    """
    kind = "Parquet" if patterns == ("*.parquet",) else f"Parquet or {patterns[0]}"
    default_dir = os.environ.get("FEDATTUNE_DATA")
    place = Path(default_dir).expanduser() if data_dir is None and default_dir else data_dir
    files = _find_in_folder(name, place, patterns) if place else []
    if not files and data_dir is not None:
        raise DataError(
            f"no {kind} files of {name} in {data_dir / name} or {data_dir}; put them there, or leave --data-dir out to "
            "download them"
        )
    if not files:
        repo = repo or HUB_IDS[name]
        folder = _download(name, repo, patterns[0], kind, default_dir)
        files = _sort_train_first(folder.rglob(patterns[0]))
        if not files:
            kind_on_hub = "Parquet" if patterns[0] == "*.parquet" else patterns[0]
            raise DataError(
                f"{repo} on the Hugging Face hub holds no {kind_on_hub} files; give a folder with them by --data-dir"
            )
    if rows == "all":
        return files
    training = [path for path in files if _is_part(path, "train")]
    if not training:
        raise DataError(
            f"none of the {len(files)} files of {name}, such as {files[0]}, has a name that begins with train; "
            f"rename the files of its training images, or set {name}.rows=all"
        )
    return training


def _find_in_folder(name: str, folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    for pattern in patterns:
        files = _sort_train_first((folder / name).rglob(pattern)) or _sort_train_first(folder.glob(pattern))
        if files:
            return files
    return []


def _sort_train_first(paths: Iterable[Path]) -> list[Path]:
    order = ("train", "valid", "test")
    return sorted(paths, key=lambda p: ([not _is_part(p, part) for part in order], p.name))


def _is_part(path: Path, part: str) -> bool:
    """Return whether the name of a file or of its folder says so: train-0.parquet, emnist-byclass-train-..."""
    return path.name.startswith(part) or f"-{part}-" in path.name or path.parent.name == part


def _download(name: str, repo: str, pattern: str, kind: str, searched: str | None) -> Path:
    """Download a set from the hub; `searched` is the folder in FEDATTUNE_DATA that does not have it."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        tried = f"FEDATTUNE_DATA={searched} was looked at and holds no {kind} files of {name}, and " if searched else ""
        raise DataError(
            f"{tried}cannot download {repo} from the Hugging Face hub ({reason}); put its {kind} files in a "
            f"folder DIR/{name} and give --data-dir DIR or set FEDATTUNE_DATA=DIR"
        ) from error


EmnistSplit = Literal["byclass", "balanced"]
EMNIST_HUB_IDS: dict[EmnistSplit, str] = {"byclass": "Royc30ne/emnist-byclass", "balanced": "Royc30ne/emnist-balanced"}
EMNIST_CLASSES: dict[EmnistSplit, tuple[str, ...]] = {
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    # Small letters that look like their capitals are merged with them.
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),
}


def read_emnist(split: EmnistSplit, data_dir: Path | None, rows: RowSet) -> Images:
    """Read the images of one of EMNIST's divisions.

    The IDX files hold every image transposed, so they are turned upright; Parquet files are taken as they are.
    """
    patterns = (f"emnist-{split}-*-ubyte.gz", f"emnist-{split}-*-ubyte", "*.parquet")
    files = _find_image_files("emnist", data_dir, rows, patterns, EMNIST_HUB_IDS[split])
    if files[0].suffix == ".parquet":
        images = read_images(files, mode="L")
    else:
        images = read_cached(files, ["idx", split], lambda: _read_idx_files(files, split))
    _check_images("emnist", files[0], images, IMAGE_SETS["emnist"]._replace(n_classes=(len(EMNIST_CLASSES[split]),)))
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
