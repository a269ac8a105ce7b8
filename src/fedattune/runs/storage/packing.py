"""Pack the scores and matrices of one round into few bytes."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.base import Scores

ZLIB_LEVEL = 1
"""The fastest compression: rows that are alike, and whole numbers, take little room already."""

SCORE_BYTES = 20
"""Bytes of one client's scores: client, samples and right predictions as int32, the sum of losses as float64."""


def pack_scores(clients: NDArray[Any], scores: Scores) -> bytes:
    """Pack the scores of clients (E,): column by column, and the clients' numbers as differences, to compress well."""
    columns = [np.diff(clients, prepend=0).astype("<i4")]
    columns += [values.cpu().numpy().astype("<i4") for values in scores[:2]]
    loss = scores.loss.cpu().numpy().astype("<f8")
    return zlib.compress(b"".join(one.tobytes() for one in (*columns, loss)), ZLIB_LEVEL)


def unpack_scores(blob: bytes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the clients (E,), and samples, right predictions and sums of losses (3, E).

    Raises:
        ValueError: the bytes are damaged.

    """
    raw = _decompress(blob)
    n, rest = divmod(len(raw), SCORE_BYTES)
    if rest or not n:
        raise ValueError(f"scores of {len(raw)} bytes, expected {SCORE_BYTES} for each client")
    whole = np.frombuffer(raw, dtype="<i4", count=3 * n).reshape(3, n)
    loss = np.frombuffer(raw, dtype="<f8", offset=12 * n)
    return np.cumsum(whole[0], dtype=np.int64), np.stack([whole[1], whole[2], loss]).astype(np.float64)


def pack_weights(weights: NDArray[Any]) -> bytes:
    """Pack a matrix of single or half precision."""
    return zlib.compress(weights.tobytes(), ZLIB_LEVEL)


def unpack_weights(blob: bytes, rows: int, columns: int) -> NDArray[np.float32]:
    """Return a matrix (rows, columns) of single or half precision as float32.

    Raises:
        ValueError: the bytes are damaged, or are of another matrix.

    """
    raw = _decompress(blob)
    dtype = np.float32 if len(raw) == 4 * rows * columns else np.float16
    if len(raw) != np.dtype(dtype).itemsize * rows * columns:
        raise ValueError(f"a matrix of {len(raw)} bytes, expected {rows} x {columns} weights")
    return np.frombuffer(raw, dtype=dtype).reshape(rows, columns).astype(np.float32, copy=False)


def _decompress(blob: Any) -> bytes:
    """Decompress bytes of the store.

    Raises:
        ValueError: they are damaged.

    """
    if not isinstance(blob, bytes):
        raise ValueError(f"expected bytes, got {blob!r:.40}")
    try:
        return zlib.decompress(blob)
    except zlib.error as error:
        raise ValueError(f"damaged bytes: {error}") from error
