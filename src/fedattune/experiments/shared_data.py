"""Share data with worker processes: copy small parts, and let every process map large arrays from files."""

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

from ..data.cache import find_mapped_file, open_mapped, save_mapped

MIN_FILE_BYTES = 1 << 16
"""Size from which an array goes into a file."""

FOLDER_PREFIX = ".shared-"


@contextmanager
def make_shared_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for shared arrays in `parent`, and remove it afterwards; remove leftovers of a crash first."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f"{FOLDER_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pack(thing: Any, folder: Path) -> bytes:
    """Pickle an object for other processes of this machine, with its large arrays in files.

    An array that is mapped from a file already stays there. Other large arrays are written to `folder`, and tensors
    of this process are mapped from it from then on, so that memory holds them once.

    Args:
        thing: the object, such as a federation.
        folder: the folder of the arrays; the bytes can be unpacked as long as it exists.

    Returns:
        The bytes for `unpack`.

    """
    buffer = io.BytesIO()
    _Packer(buffer, folder).dump(thing)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Restore an object that `pack` pickled."""
    return _Unpacker(io.BytesIO(packed)).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> tuple[str, bool] | None:
        """Return the file of a large array and whether it is a tensor; None for an object to pickle as usual."""
        is_tensor = isinstance(obj, torch.Tensor)
        if is_tensor and (obj.device.type != "cpu" or not obj.is_contiguous() or obj.requires_grad):
            return None
        is_array = is_tensor or isinstance(obj, np.ndarray)
        if not is_array or obj.nbytes < MIN_FILE_BYTES or obj.dtype == object:
            return None
        path = find_mapped_file(obj)
        if path is None:
            path = self._folder / f"{sum(1 for _ in self._folder.iterdir())}.npy"
            mapped = save_mapped(path, obj.numpy() if is_tensor else obj)
            if is_tensor:
                obj.set_(torch.from_numpy(mapped))
        return str(path), is_tensor


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, bool]) -> Any:
        """Map the array of a file."""
        path, is_tensor = pid
        array = open_mapped(Path(path))
        return torch.from_numpy(array) if is_tensor else array
