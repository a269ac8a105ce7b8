"""The image sets known by name, from a local folder or the Hugging Face hub."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ...core.errors import DataError
from .decode import ColourMode, Images, read_images

RowSet = Literal["all", "train"]  # the set's own training and test images, or its training images only


HUB_IDS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "emnist": "Royc30ne/emnist-byclass",
    "femnist": "flwrlabs/femnist",
    "tiny_imagenet": "zh-plus/tiny-imagenet",
}


IMAGE_SHAPES = {  # of the images, and the numbers of classes
    "mnist": ((1, 28, 28), (10,)),
    "fashion_mnist": ((1, 28, 28), (10,)),
    "cifar10": ((3, 32, 32), (10,)),
    "cifar100": ((3, 32, 32), (100, 20)),
    "femnist": ((1, 28, 28), (62,)),
    "tiny_imagenet": ((3, 64, 64), (200,)),
}


COLOUR_MODES: dict[str, ColourMode] = {
    "femnist": "L",
    "tiny_imagenet": "RGB",
}  # some of Tiny-ImageNet's files are grey


DIGIT_CLASSES = tuple("0123456789")  # the classes of mnist


def read_known_images(
    name: str, data_dir: Path | None, label: str | None, *, rows: RowSet = "all", owner: str | None = None
) -> Images:
    """The images of the set, which must be what the name says.

    Raises:
        DataError: they cannot be found or read, or are those of another set.

    """
    files = select_files(name, find_image_files(name, data_dir), rows)
    images = read_images(files, label, owner=owner, mode=COLOUR_MODES.get(name))
    check_images(name, files[0], images, *IMAGE_SHAPES[name])
    alike = images.has_class_names and name in (
        "mnist",
        "fashion_mnist",
    )  # of one shape: their classes tell them apart
    if alike and (images.classes == DIGIT_CLASSES) != (name == "mnist"):
        raise DataError(
            f"{files[0]} is no part of {name}: its classes are {', '.join(images.classes[:3])}, ...; give the "
            f"folder of {name}, or the name of these data"
        )
    return images


def check_images(
    name: str, file: Path, images: Images, shape: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    """Refuse images of another shape than `shape`, or of a number of classes that is not in `numbers`.

    Raises:
        DataError: they have.

    """
    got, n = images.x.shape[1:], len(images.classes)
    if got != shape or n not in numbers:
        raise DataError(
            f"{file} is no part of {name}: its images have the shape {got} and {n} classes, those of {name} "
            f"{shape} and {' or '.join(map(str, numbers))}; give the folder of {name}, or the name of these data"
        )


def find_image_files(
    name: str, data_dir: Path | None, patterns: tuple[str, ...] = ("*.parquet",), repo: str | None = None
) -> list[Path]:
    """The set's files, training rows first: those of the first of the patterns that has any.

    They are looked for in `data_dir`/name, in `data_dir` itself, likewise in FEDATTUNE_DATA, then on the hub,
    where they must be of the first pattern.

    Raises:
        DataError: `data_dir` has none, or they cannot be downloaded.

    """
    kind = "Parquet" if patterns == ("*.parquet",) else f"Parquet or {patterns[0]}"
    if data_dir is not None:
        files = _in_folder(name, data_dir, patterns)
        if not files:
            raise DataError(f"no {kind} files of {name} in {data_dir / name} or {data_dir}")
        return files
    given = os.environ.get("FEDATTUNE_DATA")
    files = _in_folder(name, Path(given).expanduser(), patterns) if given else []
    if not files:
        repo = repo or HUB_IDS[name]
        folder = _download(name, repo, patterns[0], kind, given)
        files = _train_first(folder.rglob(patterns[0]))
        if not files:
            held = "Parquet" if patterns[0] == "*.parquet" else patterns[0]
            raise DataError(f"{repo} on the Hugging Face hub holds no {held} files")
    return files


def select_files(name: str, files: list[Path], rows: RowSet) -> list[Path]:
    """The files of these rows of the set.

    Raises:
        DataError: none is named as training rows.

    """
    if rows == "all":
        return files
    training = [path for path in files if _is_part(path, "train")]
    if not training:
        raise DataError(
            f"none of the {len(files)} files of {name}, such as {files[0]}, has a name that begins with train; "
            f"rename those with its training images, or set {name}.rows=all"
        )
    return training


def _in_folder(name: str, folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    for pattern in patterns:
        files = _train_first((folder / name).rglob(pattern)) or _train_first(folder.glob(pattern))
        if files:
            return files
    return []


def _train_first(paths: Iterable[Path]) -> list[Path]:
    order = ("train", "valid", "test")
    return sorted(paths, key=lambda p: ([not _is_part(p, part) for part in order], p.name))


def _is_part(path: Path, part: str) -> bool:
    """Whether a file is of that part by its name or its folder's: train-0.parquet, emnist-byclass-train-..."""
    return path.name.startswith(part) or f"-{part}-" in path.name or path.parent.name == part


def _download(name: str, repo: str, pattern: str, kind: str, looked: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        tried = f"FEDATTUNE_DATA={looked} was looked at and holds no {kind} files of {name}, and " * bool(
            looked
        )
        raise DataError(
            f"{tried}cannot download {repo} from the Hugging Face hub ({reason}); put its {kind} files in a "
            f"folder DIR/{name} and give --data-dir DIR or set FEDATTUNE_DATA=DIR"
        ) from error
