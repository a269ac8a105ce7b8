"""Compose different Gaussian mechanisms on Poisson samples, and find the noise for an epsilon in few compositions.

`accounting.py` says what one kind of mechanism costs. A client's steps are of several kinds, and every client needs
noise of its own. The library's own search, `mechanism_calibration`, composes six times where this one composes two
or three times, and takes two to four times as long.
"""

from functools import lru_cache
from math import expm1, inf, log, sqrt
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import ConfigError

MIN_INTERVAL, MAX_INTERVAL = 5e-4, 1e-2
"""Bounds of the interval of privacy losses; losses are rounded up, so that epsilon is an upper bound for each."""

INTERVALS = 2000
"""Intervals in an epsilon, between these bounds."""

NOISE_TOLERANCE = 0.01
"""Relative distance of a noise multiplier from the smallest one that keeps the target."""

MIN_MULTIPLIER, MAX_MULTIPLIER = 0.2, 1e6
"""Bounds of the search; below the first, epsilon says nothing any more."""


class Sampled(NamedTuple):
    """Gaussian mechanisms on Poisson samples: noise multiplier, sampling rate, and their number."""

    multiplier: float
    rate: float
    times: int


@lru_cache(maxsize=4096)
def compute_epsilon(delta: float, noise: float, parts: tuple[Sampled, ...]) -> float:
    """Compute the epsilon of mechanisms whose multipliers are relative to a noise; finer for a small epsilon."""
    coarse = _compose(delta, noise, parts, MAX_INTERVAL)
    interval = max(MIN_INTERVAL, coarse / INTERVALS)
    return coarse if interval >= MAX_INTERVAL else min(coarse, _compose(delta, noise, parts, interval))


def _compose(delta: float, noise: float, parts: tuple[Sampled, ...], interval: float) -> float:
    """Compose privacy loss distributions; losses are rounded up to multiples of the interval."""
    import dp_accounting as dp

    if not parts:
        return 0.0
    if noise * min(part.multiplier for part in parts) < MIN_MULTIPLIER / 10:
        return inf
    accountant = dp.pld.PLDAccountant(value_discretization_interval=interval)
    with np.errstate(all="ignore"):  # of losses that overflow, the epsilon is infinite
        for part in parts:
            event: Any = dp.GaussianDpEvent(noise * part.multiplier)
            if part.rate < 1:
                event = dp.PoissonSampledDpEvent(part.rate, event)
            accountant.compose(dp.SelfComposedDpEvent(event, part.times))
        return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def find_multiplier(target: float, delta: float, parts: tuple[Sampled, ...]) -> float:
    """Return the smallest noise multiplier, up to a hundredth, whose epsilon is at most `target`.

    Raises:
        ConfigError: no noise reaches the target.
    """
    interval = min(max(MIN_INTERVAL, target / INTERVALS), MAX_INTERVAL)
    low, high, guess = 0.0, inf, _guess_multiplier(target, delta, parts)
    at_low = at_high = target
    while high == inf or high > low * (1 + NOISE_TOLERANCE):
        found = _compose(delta, guess, parts, interval)
        if found > target:
            low, at_low = guess, found
        else:
            high, at_high = guess, found
        if high <= MIN_MULTIPLIER:
            return high
        if low >= MAX_MULTIPLIER:
            raise ConfigError(
                f"dp_record: got epsilon {target:g}, and a noise multiplier of {MAX_MULTIPLIER:g} does not reach it; "
                "give a larger epsilon or delta, or fewer rounds or steps"
            )
        if low and high < inf:
            share = 0.5
            if at_low < inf:  # the logarithms lie about on a line
                share = log(at_low / (target * (1 - NOISE_TOLERANCE / 4))) / log(at_low / max(at_high, 1e-9))
            guess = low * (high / low) ** min(max(share, 0.1), 0.9)
        else:
            guess = guess * (1 + NOISE_TOLERANCE) if low else guess / (1 + NOISE_TOLERANCE)
            if not target / 1.1 < found < target * 1.1:
                guess *= min(max(found / target, 0.25), 4.0) ** 0.5
        guess = min(max(guess, MIN_MULTIPLIER), MAX_MULTIPLIER)
    return high


def _guess_multiplier(target: float, delta: float, parts: tuple[Sampled, ...]) -> float:
    """Guess a noise multiplier from the central limit of many mechanisms (Dong, Roth and Su, JRSS-B 2022)."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    def mu(noise: float) -> float:
        """Return the parameter of the limit: a Gaussian mechanism of sensitivity mu and noise 1."""
        exponents = [(part, min(1 / (noise * part.multiplier) ** 2, 500.0)) for part in parts]
        terms = (part.times * (part.rate**2 * expm1(e) if part.rate < 1 else e) for part, e in exponents)
        return sqrt(sum(terms))

    wanted = 1 / float(get_sigma_gaussian(target, delta))
    low, high = MIN_MULTIPLIER, MAX_MULTIPLIER
    while high / low > 1 + NOISE_TOLERANCE / 4:
        middle = sqrt(low * high)
        low, high = (middle, high) if mu(middle) > wanted else (low, middle)
    return high
