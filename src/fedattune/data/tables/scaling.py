"""Constants that prepare the numbers of a table, fitted on training rows: of each client, or of all clients together.

The constants of K columns are float64 (3, K): median, mean and deviation. They are NaN for a column that holds no
value in the rows.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...core.errors import DataError
from ..types import Array, Index, Scaling

CONSTANT_SHARE = 0.5
"""Share of the clients in which a column is constant, above which `auto` does not scale by client."""

SCALING_NOTES = {
    "client": "Numbers are standardised with mean and deviation of each client's own training part.",
    "global": "Numbers are standardised with median, mean and deviation of all training rows, which must be in one "
    "place for the median.",
    "federated": "Numbers are standardised with mean and deviation of all training rows, for which clients share "
    "count, sum and sum of squares of each column; a missing number becomes the mean.",
}

CONSTANT_NAMES = ("median", "mean", "deviation")


def choose_scaling(x: Array, train: Sequence[Index]) -> Literal["client", "federated"]:
    """Choose the scaling of a table: `client`, unless that erases what tells clients apart.

    A column that is constant within a client becomes 0 when the client scales it. If a column is constant within at
    least half of the clients, and not the same in all, `federated` keeps it.
    """
    if not x.shape[1]:
        return "client"
    low, high = (np.stack([reduce(x[rows], axis=0) for rows in train]) for reduce in (np.fmin.reduce, np.fmax.reduce))
    is_constant = (low == high).mean(axis=0) >= CONSTANT_SHARE
    differs = np.fmin.reduce(low, axis=0) < np.fmax.reduce(high, axis=0)
    return "federated" if bool((is_constant & differs).any()) else "client"


def fit_all_constants(x: Array, train: Sequence[Index], scaling: Scaling) -> list[Array]:
    """Fit the constants (3, K) of each client; `global` and `federated` give all clients the same."""
    if scaling == "client":
        return [_fit_constants(x[rows]) for rows in train]
    if scaling == "global":
        constants = _fit_constants(x[np.concatenate(train)])
    else:
        constants = _combine_moments([_share_moments(x[rows]) for rows in train])
    return [constants] * len(train)


def _share_moments(x: Array) -> Array:
    """Return what one client shares for federated scaling, (3, K): count, mean and mean square distance from it."""
    n = (~np.isnan(x)).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values
        mean, variance = np.nan_to_num(np.nanmean(x, axis=0)), np.nan_to_num(np.nanvar(x, axis=0))
    return np.stack([n, mean, variance])


def _combine_moments(moments: Sequence[Array]) -> Array:
    """Combine what clients shared to the constants (3, K) of all rows; the mean stands for the median."""
    n, mean, variance = np.stack(moments).transpose(1, 0, 2)  # each (N, K)
    total = n.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = (n * mean).sum(axis=0) / total
        deviation = np.sqrt((n * (variance + (mean - centre) ** 2)).sum(axis=0) / total)
    # As scikit-learn has it: a column of one value, but for rounding, is not scaled.
    tiny = deviation <= 10 * np.finfo(np.float64).eps * np.abs(centre)
    return np.stack([centre, centre, np.where(tiny, 1.0, deviation)])


def _fit_constants(x: Array) -> Array:
    """Fit the constants (3, K) on training rows x (n, K), NaN where missing."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    constants = np.full((3, x.shape[1]), np.nan)
    columns = np.flatnonzero(~np.isnan(x).all(axis=0))
    if len(columns):
        imputer, scaler = SimpleImputer(strategy="median"), StandardScaler()
        rows = x[np.ix_(np.arange(len(x)), columns)]  # row by row in memory: the last bits of sums depend on it
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
    """Return the constants (3, K) of the columns `numbers` that `constants_to_card` wrote."""
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
