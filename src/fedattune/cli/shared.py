"""Hand data over to other processes: small parts are copied, large arrays are mapped from files by all of them."""

import io
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.mapped import file_of, open_mapped, save_mapped

LARGE = 1 << 16
"""Bytes from which an array goes into a file."""

PREFIX = ".shared-"


@contextmanager
def packing(scratch: Path) -> Iterator[Path]:
    """A folder in `scratch` for the arrays of what is packed, as long as it is used; remains of a crash go."""
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.glob(f"{PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pack(thing: Any, folder: Path) -> bytes:
    """Bytes from which another process of this machine makes the same thing, as long as `folder` is there.

    Large arrays that are mapped from a file already stay there; the others are written to `folder`, and tensors of
    this process then lie there too, instead of in memory once more.
    """
    buffer = io.BytesIO()
    _Packer(buffer, folder).dump(thing)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed."""
    return _Unpacker(io.BytesIO(packed)).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> tuple[str, bool] | None:
        """The file of a large array, and whether it is a tensor; None for all that is pickled as usual."""
        tensor = isinstance(obj, torch.Tensor)
        if tensor and (obj.device.type != "cpu" or not obj.is_contiguous() or obj.requires_grad):
            return None
        if not (tensor or isinstance(obj, np.ndarray)) or obj.nbytes < LARGE or obj.dtype == object:
            return None
        path = file_of(obj)
        if path is None:
            path = self._folder / f"{sum(1 for _ in self._folder.iterdir())}.npy"
            mapped = save_mapped(path, obj.numpy() if tensor else obj)
            if tensor:
                obj.set_(torch.from_numpy(mapped))
        return str(path), tensor


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, bool]) -> Any:
        """The array in a file."""
        path, tensor = pid
        array = open_mapped(Path(path))
        return torch.from_numpy(array) if tensor else array
