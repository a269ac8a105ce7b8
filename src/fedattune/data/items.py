"""Read data sets item by item: map-style Datasets of PyTorch, and rows of the library `datasets`."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..core.errors import DataError
from .images.decode import read_pixels
from .types import Array

SHOWN_ITEMS = 5_000
"""Items above which a terminal shows progress: a Dataset may decode files."""


def read_torch_dataset(where: str, dataset: Any) -> tuple[Array, Array]:
    """Read all items (x, y) of a map-style Dataset, each once; `where` names it in messages.

    Raises:
        DataError: the Dataset has no indices, or an item is no pair, of another shape, or no numbers.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{where}: an iterable Dataset has no indices, from which each part takes its own; give arrays, or a "
            "map-style Dataset"
        )

    def get(i: int) -> tuple[Any, Any]:
        pair = dataset[i]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            got = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
            raise DataError(f"{where}: every item of the Dataset must be a pair (x, y), and item {i} is {got}")
        return pair[0], pair[1]

    return read_items(where, len(dataset), get)


def read_items(where: str, n: int, get: Callable[[int], tuple[Any, Any]]) -> tuple[Array, Array]:
    """Return samples (n, *shape) and targets (n, ...) of the items 0 to n - 1, each read once.

    A PIL image becomes float32 (channels, height, width) from 0 to 1, as by torchvision's `ToTensor`. A number becomes
    one feature.

    Raises:
        DataError: an item is of another shape, or no numbers; the message names it by `where` and its number.
    """
    x, targets = np.empty((0, 1), dtype=np.float32), []
    for i in _show_progress(where, n):
        value, target = get(i)
        sample = np.atleast_1d(_read_sample(f"{where}: item {i}", value))
        if i == 0:
            x = np.empty((n, *sample.shape), dtype=sample.dtype)
        if sample.shape != x.shape[1:]:
            raise DataError(
                f"{where}: samples must all have one shape, and item 0 has {x.shape[1:]}, item {i} {sample.shape}; "
                "make images of one size and colour, and give sequences of unequal length as a list of tensors"
            )
        if sample.dtype != x.dtype:
            x = x.astype(np.result_type(x, sample), copy=False)
        if target is None:
            raise DataError(f"{where}: item {i} has no target (None); give every item one, or leave it out")
        x[i] = sample
        targets.append(to_array(target))
    shapes = {target.shape: i for i, target in reversed([*enumerate(targets)])}
    if len(shapes) > 1:
        (one, first), (other, second), *_ = sorted(shapes.items(), key=lambda item: item[1])
        raise DataError(f"{where}: targets must all have one shape, and item {first} has {one}, item {second} {other}")
    return x, np.asarray(targets)


def to_array(values: Any) -> Array:
    """Return a tensor, or anything that NumPy takes, as an array."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    dense = values.detach().cpu().to_dense()
    return (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()  # NumPy has no bfloat16


def _read_sample(where: str, value: Any) -> Array:
    pillow = sys.modules.get("PIL.Image")  # who has an image has loaded it
    if pillow is not None and isinstance(value, pillow.Image):
        return read_pixels(value, where).astype(np.float32) / 255
    try:
        array: Array = to_array(value)
    except ValueError:  # lists of different lengths
        raise DataError(f"{where} has an x whose rows differ in length; pad or cut them to one length") from None
    if array.dtype.kind not in "buif":
        raise DataError(
            f"{where} has an x of the type {type(value).__name__}, expected a tensor, an array, a PIL image or numbers"
        )
    return array


def _show_progress(where: str, n: int) -> Iterable[int]:
    if n < SHOWN_ITEMS or not sys.stderr.isatty():
        return range(n)
    from rich.console import Console
    from rich.progress import track

    return track(range(n), f"reading {where}", console=Console(stderr=True), transient=True)
