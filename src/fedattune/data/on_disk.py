"""Samples that stay in .npy files, so that a federation may be larger than memory: each batch reads its own rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .dataset import hash_arrays
from .types import Array, Index

MAX_OPEN_FILES = 256
"""Files that stay mapped at a time; a process may open 1,024 of them on many systems."""
CHECKED_ROWS = 8
"""Rows of each array that are read to check that their values are finite; to read all could take hours."""


class Piece(NamedTuple):
    """An array in a file: path, size and time of change of the file; first byte, type as NumPy has it, and shape."""

    file: str
    size: int
    changed: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """The samples (n, *shape) of a federation in files, as the tensor of a federation in memory would have them.

    Args:
        pieces: arrays in files, whose rows follow one another.
        dtype: type in which rows are read: uint8, int64 or float32.
        rows: numbers of the rows among those of all pieces; None for all rows.
    """

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    rows: Index | None = None

    @cached_property
    def _bounds(self) -> Index:
        return np.cumsum([0, *(piece.shape[0] for piece in self.pieces)])

    def __len__(self) -> int:
        return int(self._bounds[-1]) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> torch.Size:
        """Number of samples, and shape of one."""
        return torch.Size((len(self), *self.pieces[0].shape[1:]))

    @property
    def outline(self) -> Array:
        """An array of the same shape without the values, which takes no memory."""
        return np.broadcast_to(np.uint8(0), self.shape)

    def numel(self) -> int:
        """Return the number of values."""
        return self.shape.numel()

    def float(self) -> "RowsOnDisk":
        """Return the same samples, read as float32."""
        return replace(self, dtype=torch.float32)

    def select(self, rows: Tensor) -> "RowsOnDisk":
        """Return the samples with some numbers (m,), which stay in their files."""
        numbers = rows.cpu().numpy()
        return replace(self, rows=numbers if self.rows is None else self.rows[numbers])

    def read(self, rows: Tensor) -> Tensor:
        """Read the samples with some numbers, of any shape: (numbers, *shape) on the device of the numbers.

        Raises:
            DataError: a file is not there any more, or cannot be read.
        """
        numbers = rows.reshape(-1).cpu().numpy()
        if self.rows is not None:
            numbers = self.rows[numbers]
        out = np.empty((len(numbers), *self.shape[1:]), dtype=str(self.dtype).removeprefix("torch."))
        owner = np.searchsorted(self._bounds, numbers, side="right") - 1
        for k in np.unique(owner):
            own = owner == k
            with np.errstate(over="ignore"):  # beyond float32: it is no finite number there
                out[own] = _open(self.pieces[k])[numbers[own] - self._bounds[k]]
        return torch.from_numpy(out).to(rows.device)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the files' names, sizes and times of change, and of where the samples are in them.

        The content of the files is not read.
        """
        digest = hashlib.sha256(b"" if self.rows is None else hash_arrays(self.rows).encode())
        for piece in self.pieces:
            digest.update(repr((Path(piece.file).name, *piece[1:])).encode())
        return digest.hexdigest()

    def find_nonfinite_row(self) -> int | None:
        """Find a row with NaN or an infinite value among CHECKED_ROWS rows; None if there is none."""
        if self.dtype != torch.float32:
            return None
        rows = torch.from_numpy(np.unique(np.linspace(0, len(self) - 1, CHECKED_ROWS).astype(np.int64)))
        wrong = [int(row) for row in rows if not self.read(row).isfinite().all()]
        return wrong[0] if wrong else None


@lru_cache(maxsize=MAX_OPEN_FILES)
def _open(piece: Piece) -> Array:
    """Map an array in a file."""
    try:
        about = Path(piece.file).stat()
        if (about.st_size, about.st_mtime_ns) != (piece.size, piece.changed):
            raise OSError("it has changed")
        return np.memmap(piece.file, np.dtype(piece.dtype), "r", piece.offset, piece.shape)
    except OSError as error:
        raise DataError(
            f"{piece.file} cannot be read ({error}); the samples of a federation stay in their files, so leave the "
            "file as it was until training is over"
        ) from error


def open_rows(where: str, values: Any) -> RowsOnDisk | None:
    """Return the rows of an array that NumPy has mapped from a file, or of a .npy file by its path; None for others.

    Raises:
        DataError: the file is no .npy file, or its rows do not follow one another; `where` names it in messages.
    """
    if isinstance(values, str | Path):
        try:
            values = np.load(values, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: x is {str(values)!r}, expected the path of a .npy file ({error})") from error
    mapping: Any = getattr(values, "_mmap", None)  # None in a copy that NumPy made
    # With mode "c", values that were written are in memory alone.
    if not isinstance(values, np.memmap) or mapping is None or values.filename is None or values.mode == "c":
        return None
    if values.dtype.kind not in "buif":
        raise DataError(f"{where}: x must hold numbers, got {values.dtype}")
    if values.ndim < 2 or not values.flags.c_contiguous:
        raise DataError(
            f"{where}: x is a part of {values.filename} of shape {values.shape}, expected consecutive rows of shape "
            "(n, features...); write the rows in the order of the clients"
        )
    is_whole = values.dtype.kind in "ui"
    dtype = torch.uint8 if values.dtype == np.uint8 else torch.int64 if is_whole else torch.float32
    begin = values.offset - values.offset % ALLOCATIONGRANULARITY  # where the mapping begins in the file
    offset = begin + values.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    file = Path(values.filename).resolve()
    about = file.stat()
    piece = Piece(str(file), about.st_size, about.st_mtime_ns, offset, values.dtype.str, values.shape)
    return RowsOnDisk((piece,), dtype)


def hash_samples(x: Tensor | RowsOnDisk, y: Array) -> str:
    """Return the fingerprint of samples and their targets."""
    if isinstance(x, RowsOnDisk):
        return hashlib.sha256((x.fingerprint + hash_arrays(y)).encode()).hexdigest()
    return hash_arrays(x.cpu().numpy(), y)


def join_rows(parts: Sequence[RowsOnDisk]) -> RowsOnDisk:
    """Return the rows of several arrays, which are read in one type, one after the other."""
    return RowsOnDisk(tuple(piece for part in parts for piece in part.pieces), parts[0].dtype)
