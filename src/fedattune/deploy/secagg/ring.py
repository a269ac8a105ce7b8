"""Fixed-point numbers modulo 2^64, and masks that look uniform there."""

import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from . import ClipRangeError

Ring = NDArray[np.uint64]
"""Numbers modulo 2^64; NumPy's sums of uint64 are sums in this ring."""

Fixed = NDArray[np.int64]
"""Fixed-point numbers with a sign, before they are masked or after the masks are gone."""

MAX_COUNT = 1 << 40
"""Largest sum of weights, samples or steps of one node; with it, no count of fewer than 2^23 nodes overflows."""

MAX_LOSS = 2.0**32
"""Largest sum of losses of one node; a larger one counts as this one."""

LOSS_BITS = 24
"""Binary places of a sum of losses, so that 127 nodes of MAX_LOSS do not overflow."""


def find_weight_limit(bits: int, clip: float, n_nodes: int) -> int:
    """Return the largest sum of weights of one node with which no sum over `n_nodes` nodes overflows."""
    largest = math.ceil(math.ldexp(clip, bits)) + 1
    return min(MAX_COUNT, ((1 << 63) - 1) // (largest * n_nodes))


def quantize(values: NDArray[np.float64], bits: int, clip: float) -> Fixed:
    """Round values to `bits` binary places; larger ones are refused, as to cut them off would change the sum."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= clip:
        raise ClipRangeError(
            f"a value of an upload is {largest:.4g}, expected {clip:g} at most; raise secure-clip (and lower "
            "secure-bits) in the run's configuration, or lower the learning rate"
        )
    return np.rint(np.ldexp(values, bits)).astype(np.int64)


def dequantize(fixed: Fixed, bits: int) -> NDArray[np.float64]:
    """Return the values of fixed-point numbers with `bits` binary places."""
    return np.ldexp(fixed.astype(np.float64), -bits)


def quantize_loss(loss: float) -> int:
    """Return a sum of losses as a fixed-point number; what is not finite counts as MAX_LOSS."""
    return round(math.ldexp(loss if 0 <= loss <= MAX_LOSS else MAX_LOSS, LOSS_BITS))


def expand_mask(key: bytes, n: int) -> Ring:
    """Expand a key of 32 bytes to n numbers: the key stream of AES-256 in counter mode. Use a key once."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(8 * n))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)
