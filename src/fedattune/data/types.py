"""Types of arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = NDArray[np.int64]
"""Numbers of samples or clients."""
