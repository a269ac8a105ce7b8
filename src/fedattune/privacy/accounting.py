"""Account for differential privacy: the epsilon of a noise, and the noise for an epsilon.

All numbers come from Google's `dp-accounting`. `epsilon_of` and `noise_for` say which of its events FedAttune's
sampling is. `compute_epsilon` and `find_multiplier` compose steps of several kinds, for many clients. Their search
composes two or three times, the library's own (`mechanism_calibration`) six times, in two to four times the time.
"""

from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from math import ceil, exp, expm1, floor, inf, isfinite, log, log10, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from ..core.errors import ConfigError

Sampling = Literal["poisson", "fixed", "none"]
"""The draw of those that take part in a step.

`poisson`: each by itself with probability `sample_rate`. `fixed`: a share `sample_rate` of all, without replacement.
`none`: everybody, or a draw that the observer sees: privacy must not count on it.
"""

MAX_PARTS = 10_000_000
"""Largest number of parts that a sampling rate is a fraction of."""

MAX_NOISE = 1e6
"""Largest noise multiplier that is searched for."""

MIN_NOISE = 1e-2
"""Smallest noise multiplier that is searched for; below it, epsilon says nothing any more."""

FINE_STEP, COARSE_STEP, COARSE_FROM = 1e-4, 1e-3, 10.0
"""Steps of the privacy loss: the library's own, and ten times that from an epsilon where it adds less than 1%.

Both give upper bounds. A coarse step takes a tenth of the time, and seconds are spent where epsilon is large.
"""

RELATIVE_TOLERANCE = 1e-3
"""Relative distance of a noise multiplier from the smallest one that keeps the target."""


def check_accounting() -> None:
    """Check that the library is there that accounts for privacy."""
    if find_spec("dp_accounting") is None:
        raise ConfigError(
            "differential privacy needs the package dp-accounting, which is not installed; run pip install "
            "'fedattune[privacy]'"
        )


def format_epsilon(epsilon: float, digits: int = 3) -> str:
    """Format an epsilon, rounded up: a promise must not look stronger than it is."""
    if not 0 < epsilon < inf:
        return f"{epsilon:g}"
    unit = 10.0 ** (floor(log10(epsilon)) - digits + 1)
    return f"{ceil(epsilon / unit - 1e-9) * unit:.{digits}g}"


def epsilon_of(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, sampling: Sampling = "poisson"
) -> float:
    """Return the epsilon of `steps` Gaussian mechanisms at `delta`; infinite without noise.

    The noise multiplier is the standard deviation of the noise on a sum over the norm C that each part is clipped to.

    - `poisson`: neighbours differ by one part that is there or not, so the sum moves by C. The accountant composes
      privacy loss distributions (Koskela, Jälkö and Honkela, AISTATS 2020).
    - `fixed`: neighbours differ by one part that is replaced, so the sum moves by 2 C. The accountant composes Renyi
      divergences (Wang, Balle and Kasiviswanathan, AISTATS 2019, Theorem 27).
    - `none`: as `fixed`, and all steps are one Gaussian mechanism, whose epsilon is exact (Balle and Wang, ICML 2018).

    Args:
        sample_rate: expected share of all parts in a step, from 0 to 1; 1 with `none`.
        steps: number of steps in which a part may be drawn; with `none`, in which it takes part.

    Examples:
        The first example of Abadi et al. (CCS 2016): noise 4, batches of 1% and 10,000 steps. Their moments accountant
        gave 1.26.

        >>> round(epsilon_of(4.0, 0.01, 10_000, 1e-5), 2)
        0.95
    """
    _check(sample_rate, steps, delta, sampling)
    if not noise_multiplier >= 0:
        raise ConfigError(f"noise multiplier: got {noise_multiplier:g}, expected a number of at least 0")
    if not steps or not sample_rate:
        return 0.0
    if not noise_multiplier:
        return inf
    check_accounting()
    return _compute_epsilon(float(noise_multiplier), float(sample_rate), int(steps), float(delta), sampling)


def noise_for(epsilon: float, delta: float, sample_rate: float, steps: int, *, sampling: Sampling = "poisson") -> float:
    """Return the smallest noise multiplier, up to a thousandth, whose epsilon is at most `epsilon`.

    See `epsilon_of` for the arguments.
    """
    _check(sample_rate, steps, delta, sampling)
    if not (isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"target epsilon: got {epsilon:g}, expected a number above 0")
    if not steps or not sample_rate:
        return 0.0
    check_accounting()
    return _compute_noise(float(epsilon), float(delta), float(sample_rate), int(steps), sampling)


def _check(sample_rate: float, steps: int, delta: float, sampling: Sampling) -> None:
    if not 0 <= sample_rate <= 1:
        raise ConfigError(f"sampling rate: got {sample_rate:g}, expected a share from 0 to 1")
    if sampling == "none" and sample_rate not in {0, 1}:
        raise ConfigError(f"sampling rate: got {sample_rate:g} without sampling, expected 1")
    if steps < 0:
        raise ConfigError(f"steps: got {steps}, expected at least 0")
    if not 0 < delta < 1:
        raise ConfigError(f"delta: got {delta:g}, expected a probability between 0 and 1, such as 1e-5")


@lru_cache(maxsize=4096)
@np.errstate(all="ignore")  # a delta of zero has the logarithm minus infinity, of which the library makes epsilon
def _compute_epsilon(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, sampling: Sampling
) -> float:
    import dp_accounting as dp
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if sampling == "none":
        return float(get_epsilon_gaussian(noise_multiplier / (2 * sqrt(steps)), delta))
    if sampling == "poisson":
        if sample_rate == 1:
            return float(get_epsilon_gaussian(noise_multiplier / sqrt(steps), delta))
        drawn = dp.PoissonSampledDpEvent(sample_rate, dp.GaussianDpEvent(noise_multiplier))
        for step in (COARSE_STEP, FINE_STEP):
            losses = dp.pld.PLDAccountant(value_discretization_interval=step)
            epsilon = float(losses.compose(dp.SelfComposedDpEvent(drawn, steps)).get_epsilon(delta))
            if epsilon > COARSE_FROM:
                break
        return epsilon
    # dp-accounting takes the ratio of the noise to the sensitivity, and to replace one part moves the sum by 2 C.
    share = Fraction(sample_rate).limit_denominator(MAX_PARTS)
    one = dp.GaussianDpEvent(noise_multiplier / 2)
    event = dp.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, one)
    divergences = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    epsilon = float(divergences.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta))
    # The bound for samples is above the one for all parts if most are drawn; both hold.
    return min(epsilon, float(get_epsilon_gaussian(noise_multiplier / (2 * sqrt(steps)), delta)))


@lru_cache(maxsize=4096)
def _compute_noise(epsilon: float, delta: float, sample_rate: float, steps: int, sampling: Sampling) -> float:
    """Return the smallest noise that does not exceed the target, by Brent's method on logarithms."""
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        found = _compute_epsilon(exp(log_noise), sample_rate, steps, delta, sampling)
        return log(min(max(found / epsilon, 1e-9), 1e9))

    high, factor = 0.0, log(4)
    while excess(high) > 0:
        high += factor
        if high > log(MAX_NOISE):
            raise ConfigError(
                f"target epsilon: got {epsilon:g}, and a noise multiplier of {MAX_NOISE:g} does not reach it; give a "
                "larger epsilon or delta, or fewer rounds"
            )
    low = high - factor
    while low > log(MIN_NOISE) and excess(low) <= 0:
        high, low = low, low - factor
    if excess(low) <= 0:
        return exp(low)
    return exp(float(brentq(excess, low, high, xtol=RELATIVE_TOLERANCE / 2)) + RELATIVE_TOLERANCE / 2)


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
    """Return the smallest noise multiplier, up to a hundredth, whose epsilon is at most `target`."""
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
