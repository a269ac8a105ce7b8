"""Constants that prepare the numbers of a table, fitted on training rows: of each client, or of all clients together.

The constants of K columns are float64 (3, K): median, mean and deviation. The deviation is NaN for a column that holds
no value in the rows, or a single one: no scale can be estimated from it, and models do not look at such a column.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..types import Array, Index, Scaling

MIN_DIFFERENT_ROWS = 5
"""Rows of a client that must differ from the median of a column, or the client takes the deviation of all clients."""

TAIL_DEVIATIONS, MAX_TAIL_SHARE, N_TRIMS = 5.0, 0.005, 8
"""Deviations beyond which a value is far from all others, if at most this share of the rows is; and times to look."""
MAX_DEVIATIONS = 10.0
"""Deviations to which models see numbers, so that a typing error moves no prediction further."""

SCALING_NOTES = {
    "client": "Numbers are standardised with mean and deviation of each client's own training part.",
    "global": "Numbers are standardised with median, mean and deviation of all training rows, which must be in one "
    "place for the median.",
    "federated": "Numbers are standardised with mean and deviation of all training rows, for which clients share "
    "count, sum and sum of squares of each column; a missing number becomes the mean.",
}

CONSTANT_NAMES = ("median", "mean", "deviation")


def fit_all_constants(x: Array, train: Sequence[Index], scaling: Scaling) -> tuple[list[Array], Array]:
    """Fit the constants (3, K) of each client, and mark the deviations that it took from all clients, (N, K).

    `global` and `federated`, which is `auto`, give all clients the same.
    """
    if scaling == "client":
        return _fit_by_client([x[rows] for rows in train])
    if scaling == "global":
        constants = _fit_constants(x[np.concatenate(train)])
    else:
        constants = _fit_shared([x[rows] for rows in train])
    return [constants] * len(train), np.zeros((len(train), x.shape[1]), dtype=bool)


def _fit_shared(xs: Sequence[Array]) -> Array:
    """Fit the constants (3, K) of all rows from what clients share.

    Where a column has a few values far from all others, as typing errors are, clients share it again with these values
    drawn in, so that they do not hide the differences between the others.
    """
    constants = _combine_moments(np.stack([_share_moments(x) for x in xs]))
    for _ in range(N_TRIMS):
        _, mean, deviation = constants
        low, high = mean - TAIL_DEVIATIONS * deviation, mean + TAIL_DEVIATIONS * deviation
        with np.errstate(invalid="ignore"):
            n_far = np.sum([((x < low) | (x > high)).sum(axis=0) for x in xs], axis=0)
        is_trimmed = (n_far > 0) & (n_far <= MAX_TAIL_SHARE * np.sum([(~np.isnan(x)).sum(axis=0) for x in xs], axis=0))
        if not is_trimmed.any():
            break
        trimmed = _combine_moments(
            np.stack([_share_moments(np.clip(x[:, is_trimmed], low[is_trimmed], high[is_trimmed])) for x in xs])
        )
        constants[:, is_trimmed] = trimmed
    return constants


def _fit_by_client(xs: Sequence[Array]) -> tuple[list[Array], Array]:
    """Fit each client's constants on its own rows; too few different values take the deviation of all clients.

    That deviation is the one within clients, or the one of all rows where every client has a single value.
    """
    moments = np.stack([_share_moments(x) for x in xs])
    n, _, variance = moments.transpose(1, 0, 2)  # each (N, K)
    pooled = _combine_moments(moments)
    with np.errstate(invalid="ignore", divide="ignore"):
        within = np.sqrt((n * variance).sum(axis=0) / n.sum(axis=0))
    deviation = np.where(_is_rounding(within, pooled[1]) | np.isnan(pooled[2]), pooled[2], within)
    constants = [_fit_constants(x) for x in xs]
    differing = [((x != one[0]) & ~np.isnan(x)).sum(axis=0) for x, one in zip(xs, constants, strict=True)]
    borrows = (np.stack(differing) < MIN_DIFFERENT_ROWS) & (n > 0)
    for one, mine in zip(constants, borrows, strict=True):
        one[2, mine] = deviation[mine]
    return constants, borrows & ~np.isnan(deviation) & (len(xs) > 1)


def _share_moments(x: Array) -> Array:
    """Return what one client shares for federated scaling, (3, K): count, mean and mean square distance from it."""
    n = (~np.isnan(x)).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values
        mean, variance = np.nan_to_num(np.nanmean(x, axis=0)), np.nan_to_num(np.nanvar(x, axis=0))
    return np.stack([n, mean, variance])


def _combine_moments(moments: Array) -> Array:
    """Combine what clients shared, (N, 3, K), to the constants (3, K) of all rows; the mean stands for the median."""
    n, mean, variance = moments.transpose(1, 0, 2)  # each (N, K)
    total = n.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = (n * mean).sum(axis=0) / total
        deviation = np.sqrt((n * (variance + (mean - centre) ** 2)).sum(axis=0) / total)
    return np.stack([centre, centre, np.where(_is_rounding(deviation, centre), np.nan, deviation)])


def _is_rounding(deviation: Array, mean: Array) -> Array:
    """Mark deviations (K,) of columns of a single value, which are 0 but for rounding."""
    return np.asarray(deviation <= 10 * np.finfo(np.float64).eps * np.abs(mean))


def _fit_constants(x: Array) -> Array:
    """Fit the constants (3, K) on training rows x (n, K), NaN where missing; a single value has no deviation."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    constants = np.full((3, x.shape[1]), np.nan)
    columns = np.flatnonzero(~np.isnan(x).all(axis=0))
    if len(columns):
        imputer, scaler = SimpleImputer(strategy="median"), StandardScaler()
        rows = x[np.ix_(np.arange(len(x)), columns)]  # row by row in memory: the last bits of sums depend on it
        filled = imputer.fit_transform(rows)
        scaler.fit(filled)
        is_single = filled.min(axis=0) == filled.max(axis=0)
        constants[:, columns] = imputer.statistics_, scaler.mean_, np.where(is_single, np.nan, scaler.scale_)
    return constants


def standardise(x: Array, constants: Array) -> Array:
    """Fill rows x (n, K), NaN where missing, with the median, and standardise them; float32 (n, K).

    A column without a deviation becomes 0.
    """
    median, mean, deviation = constants
    filled = (np.where(np.isnan(x), median, x) - mean) / deviation
    return np.where(np.isnan(deviation), 0.0, filled).astype(np.float32)


def limit(z: Array) -> Array:
    """Limit standardised numbers to MAX_DEVIATIONS on both sides."""
    return np.clip(z, -MAX_DEVIATIONS, MAX_DEVIATIONS)


def undo_scaling(x: Array, constants: Sequence[Array], rows: Sequence[Index]) -> Array:
    """Return the numbers (n, K) that each client has standardised, in the first K columns of x (n, F).

    A missing number is the one that its client put in its place; rows of no client are NaN.
    """
    k = constants[0].shape[1]
    raw = np.full((len(x), k), np.nan)
    for (_, mean, deviation), mine in zip(constants, rows, strict=True):
        raw[mine] = x[mine, :k] * np.nan_to_num(deviation) + mean
    return raw


def constants_to_card(constants: Array, numbers: Sequence[str]) -> dict[str, dict[str, float] | None]:
    """Return the constants by column for JSON; None for a column without a deviation."""
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
