"""Arrays in .npy files, mapped into memory: all processes that open one share its pages."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..files import replacing
from .dataset import Array

_files: dict[int, tuple[Path, tuple[int, ...], np.dtype[Any]]] = {}
"""Address of an array that is mapped here -> its file and its bytes."""


def open_mapped(path: Path) -> Array:
    """The array in a .npy file, its pages read when they are first looked at.

    What is written to it stays with this process and never reaches the file.

    Raises:
        OSError, ValueError: there is no such file, or it holds no array.

    """
    found = np.load(path, mmap_mode="c", allow_pickle=False)
    address = found.ctypes.data
    _files[address] = path.resolve(), found.shape, found.dtype
    weakref.finalize(found, _files.pop, address, None)
    array: Array = found.view(np.ndarray)
    return array


def file_of(array: Array | torch.Tensor) -> Path | None:
    """The file that a whole array was mapped from by this process, if it is still there, or None."""
    own: Array = array.numpy() if isinstance(array, torch.Tensor) else array
    if (known := _files.get(own.ctypes.data)) is None:
        return None
    path, shape, dtype = known
    whole = own.flags.c_contiguous and (own.shape, own.dtype) == (shape, dtype)
    return path if whole and path.exists() else None


def save_mapped(path: Path, array: Array) -> Array:
    """Write an array to a .npy file, all or nothing, and return the one that is mapped from it."""
    with replacing(path) as new, new.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    return open_mapped(path)
