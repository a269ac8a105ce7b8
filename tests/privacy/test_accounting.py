"""Privacy accounting against published numbers, closed formulas, and bounds."""

from math import exp, inf, isclose, sqrt

import pytest
from scipy.stats import norm

from fedattune.core.errors import ConfigError
from fedattune.privacy import accounting
from fedattune.privacy.accounting import epsilon_of, format_epsilon, noise_for


def _delta_of_gaussian(epsilon: float, sigma: float) -> float:
    """Return delta of a Gaussian mechanism of sensitivity 1: Balle and Wang (ICML 2018), Theorem 8."""
    return float(norm.cdf(0.5 / sigma - epsilon * sigma) - exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma))


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "published", "tight"),
    [
        # Abadi et al. (CCS 2016), section 5.1: the moments accountant gives 1.26 for q = 0.01, sigma = 4, 10,000 steps.
        (4.0, 0.01, 10_000, 1.26, 0.95),
        # The tutorial of TensorFlow Privacy: MNIST, batches of 256, noise 1.1, 60 epochs, Renyi divergences: 3.01.
        # Privacy loss distributions are known to be tighter by a fifth.
        (1.1, 256 / 60_000, 60 * 60_000 // 256, 3.01, 2.38),
    ],
)
def test_poisson_epsilon_stays_below_published_bounds_and_is_tight(noise, rate, steps, published, tight) -> None:
    epsilon = epsilon_of(noise, rate, steps, 1e-5)
    assert epsilon < published
    assert epsilon == pytest.approx(tight, abs=0.01)  # two figures are known


@pytest.mark.parametrize(("noise", "steps"), [(4.0, 10), (2.0, 1), (30.0, 50)])
def test_without_sampling_epsilon_is_the_exact_one_of_a_gaussian(noise, steps) -> None:
    """To replace an upload moves the sum by 2 C, and T Gaussian mechanisms are one with noise / sqrt(T)."""
    epsilon = epsilon_of(noise, 1.0, steps, 1e-5, sampling="none")
    assert isclose(_delta_of_gaussian(epsilon, noise / 2 / sqrt(steps)), 1e-5, rel_tol=1e-6)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(4.0, 0.1, 50), (8.0, 0.05, 200), (3.0, 0.2, 10)])
def test_fixed_samples_cost_less_than_all_and_more_than_the_mixtures_that_they_contain(noise, rate, steps) -> None:
    """One part at +C against the rest at -C is a pair of neighbours: a mixture of two Gaussians against one."""
    epsilon = epsilon_of(noise, rate, steps, 1e-5, sampling="fixed")
    assert epsilon < epsilon_of(noise, 1.0, steps, 1e-5, sampling="none")
    assert epsilon > epsilon_of(noise / 2, rate, steps, 1e-5)


@pytest.mark.parametrize(("sampling", "target"), [("poisson", 30.0), ("fixed", 0.5), ("none", 0.5)])
def test_noise_for_a_target_keeps_it_and_wastes_little(sampling, target) -> None:
    rate = 1.0 if sampling == "none" else 0.1
    noise = noise_for(target, 1e-5, rate, 50, sampling=sampling)
    assert epsilon_of(noise, rate, 50, 1e-5, sampling=sampling) <= target
    assert epsilon_of(noise / 1.002, rate, 50, 1e-5, sampling=sampling) > target


def test_a_shown_epsilon_is_never_below_the_true_one() -> None:
    shown = [format_epsilon(one) for one in (19.44266, 19.4, 0.99999, 1e-4, 123.4, 1234.5, 0.0, inf)]
    assert shown == ["19.5", "19.4", "1", "0.0001", "124", "1.24e+03", "0", "inf"]
    assert format_epsilon(0.36981, 4) == "0.3699"


def test_edges() -> None:
    assert epsilon_of(0.0, 0.5, 3, 1e-5) == inf
    assert epsilon_of(1.0, 0.5, 0, 1e-5) == 0
    assert epsilon_of(1.0, 0.0, 5, 1e-5) == 0
    assert noise_for(1.0, 1e-5, 0.5, 0) == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: epsilon_of(1.0, 1.5, 3, 1e-5), "sampling rate: got 1.5"),
        (lambda: epsilon_of(1.0, 0.5, 3, 1e-5, sampling="none"), "without sampling, expected 1"),
        (lambda: epsilon_of(-1.0, 0.5, 3, 1e-5), "noise multiplier: got -1"),
        (lambda: epsilon_of(float("nan"), 0.5, 3, 1e-5), "noise multiplier: got nan"),
        (lambda: epsilon_of(1.0, 0.5, -3, 1e-5), "steps: got -3"),
        (lambda: epsilon_of(1.0, 0.5, 3, 0.0), "delta: got 0"),
        (lambda: noise_for(0.0, 1e-5, 0.5, 3), "target epsilon: got 0"),
        (lambda: noise_for(1e-9, 1e-12, 1.0, 1_000_000, sampling="none"), "does not reach it"),
    ],
)
def test_impossible_numbers_are_refused(call, text) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_a_missing_library_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedattune\[privacy\]'"):
        epsilon_of(1.0, 0.5, 3, 1e-5)
