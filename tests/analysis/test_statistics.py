"""Intervals and tests of a comparison, against hand-made cases and scipy."""

import numpy as np
import pytest
from scipy import stats

from fake_results import Fake, results
from fedattune.analysis.verdict import Harm, measure_harm
from fedattune.analysis.verdict.statistics import adjust_by_holm, compute_influences, compute_row_p, estimate_mean
from fedattune.core.metrics import METRICS, compute_metrics
from fedattune.runs.predictions import RowPredictions


def predicted(y: list[int], said: list[int], client: list[int] | None = None) -> RowPredictions:
    """Predictions of two classes, sure of `said`."""
    owner = np.array(client or [0] * len(y), dtype=np.int32)
    outputs = 10.0 * np.eye(2, dtype=np.float32)[said]
    return RowPredictions(owner, np.arange(len(y)), np.array(y), outputs, int(owner.max()) + 1)


def test_holm() -> None:
    assert adjust_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_by_holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert adjust_by_holm([]) == []


def test_the_interval_over_clients_is_that_of_a_t_test() -> None:
    gains = np.array([0.5, 1.0, 1.5, -0.25, 2.0, 0.75])
    one = estimate_mean(gains[None], np.ones(6), 0.25)
    known = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert one.over == "clients"
    assert one.compute_interval() == pytest.approx((known.low, known.high))
    # Splits are averaged first, and what is not known does not count.
    both = np.array([[*(gains + 1), np.nan, 5.0], [*(gains[:5] - 1), np.nan, np.nan, np.nan]])
    weights = np.array([1.0] * 5 + [0, 1, 0])
    assert estimate_mean(both, weights, 0.25).mean == pytest.approx(gains[:5].mean())
    assert estimate_mean(gains[None, :1], np.ones(1), 0.25).compute_interval() is None


def test_a_client_with_little_weight_counts_little() -> None:
    gains = np.array([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, -50.0])
    light = estimate_mean(gains[None], np.array([*[1.0] * 6, 0.001]), 0.25)
    without = estimate_mean(gains[None, :6], np.ones(6), 0.25)
    assert light.mean == pytest.approx(without.mean, abs=0.02)
    assert light.error == pytest.approx(without.error, rel=0.05)


def test_splits_that_are_alike_by_chance_are_not_sure() -> None:
    """Three splits with the same mean gain of three clients say nothing of its error; the clients do."""
    gains = np.array([[0.0, 0.01, 0.02], [0.02, 0.0, 0.01], [0.01, 0.01, 0.01]])
    one = estimate_mean(gains, np.ones(3), 0.25)
    assert one.over == "clients"
    low, high = one.compute_interval() or (0.0, 0.0)
    assert low < one.mean < high


def test_the_interval_over_splits_allows_for_rows_in_common() -> None:
    """Nadeau and Bengio: variance times 1/n + test/train, here 1/4 + 1/3; for few clients alone."""
    gains = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    one = estimate_mean(gains, np.ones(2), 0.25)
    half = stats.t.ppf(0.975, 3) * (np.var(gains[:, 0], ddof=1) * (1 / 4 + 1 / 3)) ** 0.5
    assert one.over == "splits"
    assert one.compute_interval() == pytest.approx((2.5 - half, 2.5 + half))
    assert estimate_mean(gains[:2], np.ones(2), 0.25).over == "clients"
    assert estimate_mean(np.tile(gains, 3), np.ones(6), 0.25).over == "clients"


def test_chance_makes_a_small_client_lose() -> None:
    """One of one row wrong: by chance 1 in 2; 10 of 10 rows where the models differ: 1 in 1024."""
    y = [0] * 20
    right, wrong_once, wrong_often = (predicted(y, [1] * k + [0] * (20 - k)) for k in (0, 1, 10))
    assert compute_row_p(wrong_once, right, 0, "accuracy") == pytest.approx(1 / 2)
    assert compute_row_p(wrong_often, right, 0, "accuracy") == pytest.approx(1 / 1024)
    assert compute_row_p(right, wrong_often, 0, "accuracy") == 1.0
    assert compute_row_p(right, right, 0, "accuracy") == 1.0


@pytest.mark.parametrize("metric", ["auc", "balanced_accuracy", "f1"])
@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_influence_of_rows_gives_the_spread_of_a_metric(metric: str, n_classes: int) -> None:
    """The deviation over 400 resamples of 300 rows; their own chance is a part in 28."""
    random = np.random.default_rng(0)
    y = random.integers(0, n_classes, 300)
    outputs = 1.5 * np.eye(n_classes)[y] + random.normal(size=(300, n_classes))
    influence = compute_influences(y, outputs, metric)
    assert influence.sum() == pytest.approx(0, abs=1e-9)
    draws = [random.integers(0, 300, 300) for _ in range(400)]
    spread = np.std([compute_metrics(y[d], outputs[d])[metric] for d in draws])
    assert np.sqrt((influence**2).sum()) / 300 == pytest.approx(spread, rel=0.15)


def test_a_loss_is_sure_only_among_all_clients_that_could_have_lost() -> None:
    """Ten clients, one loses 6 of 20 rows: p 1/64 alone, but a tenth of the clients would look so by chance."""
    n, rows = 10, 20
    owner = [i for i in range(n) for _ in range(rows)]
    y = [0] * (n * rows)
    worse = [1] * 6 + [0] * (n * rows - 6)
    mine, alone = predicted(y, worse, owner), predicted(y, y, owner)
    gains = np.array([-30.0] + [0.0] * (n - 1))
    pair = results(Fake("a", [0.7] + [1.0] * 9), Fake("local", [1.0] * n))
    pair[0].predictions, pair[1].predictions = {"test": mine}, {"test": alone}
    harm = measure_harm([(pair[0], pair[1])], gains, METRICS["accuracy"], [f"c{i}" for i in range(n)])
    assert (harm.n_losing, harm.n_sure) == (1, 0)
    assert harm.worst_chance == pytest.approx(1 / 64)
    assert harm.describe() == (
        "1 of 10 clients would lose, none of them by more than chance explains; client c0 with 6 of 20 test rows more "
        "wrong (by chance 1 in 64 clients would look so)"
    )


def test_one_client_is_no_clients() -> None:
    assert Harm(1, 0).describe() == "the one client whose gain is known would not lose"
    assert Harm(2, 0).describe() == "none of the 2 clients would lose"
    loses = Harm(1, 1, None, "c0", "-1.00 points")
    assert loses.describe() == "1 of 1 client would lose; client c0 with -1.00 points"
    assert loses.summarize() == "1 of 1 client would lose (client c0)"


@pytest.mark.parametrize("metric", ["auc", "balanced_accuracy", "f1"])
def test_a_class_of_few_rows_makes_no_sure_loss(metric: str) -> None:
    """Two positive rows of ten, first with one model and last with the other: hardly, but not 1 in 1,000."""
    y = np.array([1, 1, *[0] * 8])
    found, lost = np.where(y == 1, 2.0, -2.0) + 0.01 * np.arange(10), -2.0 + 0.01 * np.arange(10)
    good, bad = (make_scored(y, np.column_stack([np.zeros(10), score])) for score in (found, lost))
    p = compute_row_p(bad, good, 0, metric)
    assert 0.01 < p < 0.5
    assert compute_row_p(good, bad, 0, metric) > 0.5
    assert compute_row_p(good, good, 0, metric) == 1


@pytest.mark.parametrize("metric", ["auc", "balanced_accuracy", "f1"])
def test_chance_has_its_own_frequency_with_few_rows_of_a_class(metric: str) -> None:
    random, below = np.random.default_rng(2), 0
    y = np.array([1] * 4 + [0] * 30)
    for _ in range(200):
        made = [make_scored(y, 1.5 * np.eye(2)[y] + random.normal(size=(34, 2))) for _ in range(2)]
        below += compute_row_p(made[0], made[1], 0, metric) < 0.1
    assert below <= 36  # 20, and 3.7 deviations of 4.2; fewer where values are coarse


def make_scored(y: np.ndarray, outputs: np.ndarray) -> RowPredictions:
    """Predictions of a single client."""
    n = len(y)
    return RowPredictions(np.zeros(n, dtype=np.int32), np.arange(n), y, outputs.astype(np.float32), 1)


def test_a_client_loses_calibration_by_its_probabilities() -> None:
    """Two models with equal classes, of which one is too sure: no row differs in accuracy."""
    random = np.random.default_rng(0)
    y, n = random.integers(0, 2, 80), 80
    logits = np.where(random.random(n) < 0.7, 1, -1)[:, None] * np.where(np.arange(2) == y[:, None], 0.42, -0.42)
    client = np.zeros(n, dtype=np.int32)
    fair, sure = (RowPredictions(client, np.arange(n), y, (k * logits).astype(np.float32), 1) for k in (1, 8))
    gap = sure.measure_clients("calibration_error") - fair.measure_clients("calibration_error")
    assert gap > 0.2
    assert compute_row_p(sure, fair, 0, "calibration_error") < 0.01
    assert compute_row_p(fair, sure, 0, "calibration_error") > 0.99
    assert compute_row_p(fair, fair, 0, "calibration_error") == 1
