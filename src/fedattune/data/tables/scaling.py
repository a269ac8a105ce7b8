"""How a client's numbers of a table become inputs: constants of its own training part, kept for rows to come.

The constants of K columns are float64 (3, K): median, mean and deviation; NaN for a column that holds no value in the
client's training part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..types import Array

CONSTANT_NAMES = ("median", "mean", "deviation")


def fit_constants(x: Array) -> Array:
    """The constants (3, K) of training rows x (n, K), NaN where missing."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    found = np.full((3, x.shape[1]), np.nan)
    known = np.flatnonzero(~np.isnan(x).all(axis=0))
    if len(known):
        imputer, scaler = SimpleImputer(strategy="median"), StandardScaler()
        scaler.fit(imputer.fit_transform(x[np.ix_(np.arange(len(x)), known)]))
        found[:, known] = imputer.statistics_, scaler.mean_, scaler.scale_
    return found


def standardise(x: Array, constants: Array) -> Array:
    """Rows x (n, K), NaN where missing, filled with the median and standardised; float32 (n, K).

    A column without constants becomes 0.
    """
    median, mean, deviation = constants
    filled = (np.where(np.isnan(x), median, x) - mean) / deviation
    return np.where(np.isnan(median), 0.0, filled).astype(np.float32)


def constants_to_card(constants: Array, numbers: Sequence[str]) -> dict[str, dict[str, float] | None]:
    """The constants by column, for JSON; none of a column that holds no value in the client's training part."""
    return {
        name: None if np.isnan(values).any() else dict(zip(CONSTANT_NAMES, values.tolist(), strict=True))
        for name, values in zip(numbers, constants.T, strict=True)
    }


def constants_from_card(card: Mapping[str, Any], numbers: Sequence[str]) -> Array:
    """The constants (3, K) of the columns `numbers` that `constants_to_card` wrote.

    Raises:
        DataError: a column is missing, or its constants are no numbers.

    """
    found = np.full((3, len(numbers)), np.nan)
    for k, name in enumerate(numbers):
        try:
            given = card[name]
            if given is not None:
                found[:, k] = [float(given[key]) for key in CONSTANT_NAMES]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the constants of column {name!r} are missing or no numbers; expected {', '.join(CONSTANT_NAMES)}"
            ) from error
    return found
