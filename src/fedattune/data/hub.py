"""The image sets known by name, from a local folder or the Hugging Face hub."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import DataError
from .images import Images, read_images

HUB_IDS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}
SHAPES = {  # of the images, and the numbers of classes
    "mnist": ((1, 28, 28), (10,)),
    "fashion_mnist": ((1, 28, 28), (10,)),
    "cifar10": ((3, 32, 32), (10,)),
    "cifar100": ((3, 32, 32), (100, 20)),
}
DIGITS = tuple("0123456789")  # the classes of mnist


def known_images(name: str, data_dir: Path | None, label: str | None) -> Images:
    """The images of the set, which must be what the name says.

    Raises:
        DataError: they cannot be found or read, or are those of another set.

    """
    files = parquet_files(name, data_dir)
    images = read_images(files, label)
    shape, numbers = SHAPES[name]
    got, n = images.x.shape[1:], len(images.classes)
    if got != shape or n not in numbers:
        raise DataError(
            f"{files[0]} is no part of {name}: its images have the shape {got} and {n} classes, those of {name} "
            f"{shape} and {' or '.join(map(str, numbers))}; give the folder of {name}, or the name of these data"
        )
    alike = images.named and name in ("mnist", "fashion_mnist")  # of one shape: their classes tell them apart
    if alike and (images.classes == DIGITS) != (name == "mnist"):
        raise DataError(
            f"{files[0]} is no part of {name}: its classes are {', '.join(images.classes[:3])}, ...; give the "
            f"folder of {name}, or the name of these data"
        )
    return images


def parquet_files(name: str, data_dir: Path | None) -> list[Path]:
    """The set's Parquet files, training rows first.

    They are looked for in `data_dir`/name, in `data_dir` itself, likewise in FEDATTUNE_DATA, then on the hub.

    Raises:
        DataError: `data_dir` has none, or they cannot be downloaded.

    """
    if data_dir is not None:
        files = _in_folder(name, data_dir)
        if not files:
            raise DataError(f"no Parquet files of {name} in {data_dir / name} or {data_dir}")
        return files
    given = os.environ.get("FEDATTUNE_DATA")
    files = _in_folder(name, Path(given).expanduser()) if given else []
    if not files:
        folder = _download(name, given)
        files = _train_first(folder.rglob("*.parquet"))
        if not files:
            raise DataError(f"{HUB_IDS[name]} on the Hugging Face hub holds no Parquet files")
    return files


def _in_folder(name: str, folder: Path) -> list[Path]:
    return _train_first((folder / name).rglob("*.parquet")) or _train_first(folder.glob("*.parquet"))


def _train_first(paths: Iterable[Path]) -> list[Path]:
    order = ("train", "validation", "test")
    return sorted(paths, key=lambda p: ([not p.name.startswith(part) for part in order], p.name))


def _download(name: str, looked: str | None) -> Path:
    from huggingface_hub import snapshot_download

    repo = HUB_IDS[name]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        tried = f"FEDATTUNE_DATA={looked} was looked at and holds no Parquet files of {name}, and " * bool(
            looked
        )
        raise DataError(
            f"{tried}cannot download {repo} from the Hugging Face hub ({reason}); put its Parquet files in a "
            f"folder DIR/{name} and give --data-dir DIR or set FEDATTUNE_DATA=DIR"
        ) from error
