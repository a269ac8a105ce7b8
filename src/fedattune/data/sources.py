"""Data sets known by name, and `load_data`, which also reads tables."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..core.citing import cite
from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.options import Count, build
from .dataset import Dataset
from .images import cifar10, cifar100, emnist, fashion_mnist, femnist, mnist, tiny_imagenet
from .images.folder import load_image_folder
from .images.hub import HUB_IDS
from .tables import load_table
from .tables.file import TABLE_SUFFIXES

Deviation = Annotated[float, Field(ge=0, le=100)]


@cite("li2020federated")
def synthetic(
    _data_dir: Path | None, *, alpha: Deviation = 0.5, beta: Deviation = 0.5, clients: Count = 100, seed: int = 0
) -> Dataset:
    """Synthetic(alpha, beta): 60 features, 10 classes, one softmax model per client.

    Numbers are drawn in the order of FedMCSA's code, so seed 0 gives FedMCSA's data: 250 to 25,810 samples per client,
    205,795 in all.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be at least 0 and below 2**32, got {seed}")
    n_features, n_classes = 60, 10
    random = np.random.RandomState(seed)
    sizes = (random.lognormal(4, 2, clients).astype(np.int64) + 50) * 5
    u = random.normal(0, alpha, clients)  # mean of the client's W and b
    centre = random.normal(0, beta, clients)
    v = np.stack([random.normal(c, 1, n_features) for c in centre])
    covariance = np.diag(np.arange(1, n_features + 1) ** -1.2)
    x, y = [], []
    for i in range(clients):
        W = random.normal(u[i], 1, (n_features, n_classes))
        b = random.normal(u[i], 1, n_classes)
        mine = random.multivariate_normal(v[i], covariance, sizes[i])
        y.append((mine @ W + b).argmax(axis=1))
        x.append(mine.astype(np.float32))
    return Dataset(
        name="synthetic",
        x=np.concatenate(x),
        y=np.concatenate(y).astype(np.int64),
        classes=tuple(str(k) for k in range(n_classes)),
        owner=np.repeat(np.arange(clients), sizes),
        owners=tuple(str(i) for i in range(clients)),
    )


@cite("""
@misc{alpaydin1998optical,
  author = {Alpaydin, Ethem and Kaynak, Cenk},
  title = {Optical Recognition of Handwritten Digits},
  howpublished = {UCI Machine Learning Repository},
  year = {1998}
}
""")
def digits(_data_dir: Path | None) -> Dataset:
    """Handwritten digits, 1,797 images of 8x8, that come with scikit-learn; nothing to download."""
    pixels, labels = _read_digits()
    return Dataset(
        name="digits",
        x=pixels.astype(np.uint8)[:, None],
        y=labels.astype(np.int64),
        classes=tuple(str(k) for k in range(10)),
        scale=np.full((1, 1, 1), 1 / 16, dtype=np.float32),
    )


@cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    # Importing scikit-learn takes a second, and reading its file does not.
    package = find_spec("sklearn")
    file = Path(package.origin or "").with_name("datasets") / "data" / "digits.csv.gz" if package else None
    if file is not None and file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]
    from sklearn.datasets import load_digits  # another version may keep the file elsewhere

    return load_digits().images, load_digits().target


SOURCES: dict[str, Callable[..., Dataset]] = {
    "synthetic": synthetic,
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "emnist": emnist,
    "femnist": femnist,
    "tiny_imagenet": tiny_imagenet,
}
"""name -> function that loads the data set."""


def is_table(name_or_path: str | Path) -> bool:
    """Return whether this is the path of a table, maybe a missing one, rather than the name of a known set."""
    name = str(name_or_path)
    if name in SOURCES or name in HUB_IDS.values():
        return False
    return name.lower().endswith(TABLE_SUFFIXES) or Path(name).is_file()


def is_image_folder(name_or_path: str | Path) -> bool:
    """Return whether this is the path of a folder, maybe a missing one, rather than the name of a known set."""
    name = str(name_or_path)
    if name in SOURCES or name in HUB_IDS.values():
        return False
    return name.endswith(("/", "\\")) or Path(name).is_dir()


def resolve_source_name(name: str) -> str:
    """Return the name in `SOURCES` of data with this name there or on the Hugging Face hub.

    Raises:
        ConfigError: there are no such data.
    """
    if name in SOURCES:
        return name
    by_id = {hub_id: source for source, hub_id in HUB_IDS.items()}
    if name in by_id:
        return by_id[name]
    if name.count("/") == 1 and all(name.split("/")):
        raise ConfigError(
            f"unknown data {name!r}; {did_you_mean(name, by_id)} are the sets of the Hugging Face hub that "
            "fedattune knows, a table's path ends in .csv or .parquet, and there is no folder of images of this name"
        )
    raise ConfigError(
        f"unknown data {name!r}; {did_you_mean(name, SOURCES)}, or a path ending in .csv or .parquet, or a folder "
        "of images"
    )


def check_folder(name: str) -> Path:
    """Return the path of a folder of images, which must be there."""
    if not Path(name).is_dir():
        raise DataError(f"there is no folder {name}; give the path of a folder of images, such as photos/")
    return Path(name)


def load_data(
    name_or_path: str | Path,
    *,
    data_dir: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    client_column: str | None = None,
    target: str | None = None,
) -> Dataset:
    """Load the data with a name or hub id, the table in a file, or the images in a folder.

    Raises:
        ConfigError: no such name, options that do not fit, or a table without client column and target.
        DataError: the data cannot be found or read.
    """
    name = str(name_or_path)
    folder = None if data_dir is None else Path(data_dir).expanduser()
    columns = {"client_column": client_column, "target": target}
    if is_table(name):
        missing = [key for key, value in columns.items() if value is None]
        if missing:
            flags = " and ".join(f"{key} (--{key.replace('_', '-')})" for key in missing)
            raise ConfigError(f"the table {name} needs {flags}")
        return build("table", load_table, {**(options or {}), **columns}, Path(name))
    needless = [key for key, value in columns.items() if value is not None]
    if needless:
        raise ConfigError(f"{' and '.join(needless)} goes only with a table file (.csv, .parquet), not with {name!r}")
    if is_image_folder(name):
        return build("folder", load_image_folder, options or {}, check_folder(name))
    name = resolve_source_name(name)
    return build(name, SOURCES[name], options or {}, folder)
