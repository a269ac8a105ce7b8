"""Types of arrays."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Index = NDArray[np.int64]
"""Numbers of samples or clients."""


class TargetScale(NamedTuple):
    """Mean and deviation of a target over all training samples; models learn (y - mean) / deviation."""

    mean: float
    deviation: float


Scaling = Literal["auto", "client", "global", "federated"]
"""Rows whose constants standardise the numbers of a table; see `tables.scaling`."""
