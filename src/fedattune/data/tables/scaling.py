"""Constants that prepare a client's numbers of a table, fitted on the client's training part.

The constants of K columns are float64 (3, K): median, mean and deviation. They are NaN for a column that holds no
value in the client's training part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..types import Array

CONSTANT_NAMES = ("median", "mean", "deviation")


def fit_constants(x: Array) -> Array:
    """Fit the constants (3, K) on training rows x (n, K), NaN where missing."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    constants = np.full((3, x.shape[1]), np.nan)
    columns = np.flatnonzero(~np.isnan(x).all(axis=0))
    if len(columns):
        imputer, scaler = SimpleImputer(strategy="median"), StandardScaler()
        rows = x[
            np.ix_(np.arange(len(x)), columns)
        ]  # row by row in memory: the last bits of sums depend on it
        scaler.fit(imputer.fit_transform(rows))
        constants[:, columns] = imputer.statistics_, scaler.mean_, scaler.scale_
    return constants


def standardise(x: Array, constants: Array) -> Array:
    """Fill rows x (n, K), NaN where missing, with the median, and standardise them; float32 (n, K).

    A column without constants becomes 0.
    """
    median, mean, deviation = constants
    filled = (np.where(np.isnan(x), median, x) - mean) / deviation
    return np.where(np.isnan(median), 0.0, filled).astype(np.float32)


def constants_to_card(constants: Array, numbers: Sequence[str]) -> dict[str, dict[str, float] | None]:
    """Return the constants by column for JSON; None for a column without a value in the client's training part."""
    return {
        name: None if np.isnan(values).any() else dict(zip(CONSTANT_NAMES, values.tolist(), strict=True))
        for name, values in zip(numbers, constants.T, strict=True)
    }


def constants_from_card(card: Mapping[str, Any], numbers: Sequence[str]) -> Array:
    """Return the constants (3, K) of the columns `numbers` that `constants_to_card` wrote.

    Raises:
        DataError: a column is missing, or its constants are no numbers.

    """
    constants = np.full((3, len(numbers)), np.nan)
    for k, name in enumerate(numbers):
        try:
            if card[name] is not None:
                constants[:, k] = [float(card[name][key]) for key in CONSTANT_NAMES]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the constants of column {name!r} are missing or no numbers; expected {', '.join(CONSTANT_NAMES)}"
            ) from error
    return constants
