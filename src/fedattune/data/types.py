"""Types of arrays."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Index = NDArray[np.int64]
"""Numbers of samples or clients."""


class TargetScale(NamedTuple):
    """Mean and deviation of a target over all training samples; models learn (y - mean) / deviation.

    Of several numbers, each has its own, in a tuple.
    """

    mean: float | tuple[float, ...]
    deviation: float | tuple[float, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TargetScale":
        """Return the scale whose `_asdict` went through JSON."""
        return cls(*(tuple(one) if isinstance(one, list) else one for one in (values["mean"], values["deviation"])))

    @property
    def error_unit(self) -> float:
        """The factor from errors of models to errors in tables.

        One number has errors in its unit. Several numbers have several units, so their errors stay in deviations.
        """
        return 1.0 if isinstance(self.deviation, tuple) else self.deviation

    def restore(self, values: Array) -> Array:
        """Return values (n,) or (n, M) in the units of the target, from values in deviations."""
        if isinstance(self.deviation, tuple):
            return np.asarray(values * np.array(self.deviation) + np.array(self.mean))
        return np.asarray(values * self.deviation + self.mean)


Scaling = Literal["auto", "client", "global", "federated"]
"""Rows whose constants standardise the numbers of a table; see `tables.scaling`."""
