"""Where the Parquet files of an image set are: a local folder, or the Hugging Face hub."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import DataError

HUB_IDS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}


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
        folder = _download(name)
        files = _train_first(folder.rglob("*.parquet"))
        if not files:
            raise DataError(f"{HUB_IDS[name]} on the Hugging Face hub holds no Parquet files")
    return files


def _in_folder(name: str, folder: Path) -> list[Path]:
    return _train_first((folder / name).rglob("*.parquet")) or _train_first(folder.glob("*.parquet"))


def _train_first(paths: Iterable[Path]) -> list[Path]:
    order = ("train", "validation", "test")
    return sorted(paths, key=lambda p: ([not p.name.startswith(part) for part in order], p.name))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repo = HUB_IDS[name]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot download {repo} from the Hugging Face hub ({reason}); put its Parquet files in a folder "
            f"DIR/{name} and give --data-dir DIR or set FEDATTUNE_DATA=DIR"
        ) from error
