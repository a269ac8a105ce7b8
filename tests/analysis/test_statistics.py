"""Intervals and tests of a comparison, against hand-made cases and scipy."""

import numpy as np
import pytest
from scipy import stats

from fake_results import Fake, results
from fedattune.analysis.verdict import measure_harm
from fedattune.analysis.verdict.statistics import (
    adjust_by_holm,
    compute_influences,
    compute_row_p,
    compute_split_interval,
    compute_wilcoxon_p,
    resample_rows,
)
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


def test_wilcoxon() -> None:
    gains = np.array([0.5, 1.0, 1.5, -0.25, 2.0, 0.75])
    assert compute_wilcoxon_p(gains) == pytest.approx(stats.wilcoxon(gains, method="exact").pvalue)
    assert compute_wilcoxon_p(np.zeros(5)) == 1.0
    assert compute_wilcoxon_p(np.array([1.0] * 6)) < 0.05


def test_the_interval_over_splits_allows_for_rows_in_common() -> None:
    """Nadeau and Bengio: variance times 1/n + test/train, here 1/4 + 1/3."""
    gains = [1.0, 2.0, 3.0, 4.0]
    low, high = compute_split_interval(gains, 0.25) or (0.0, 0.0)
    half = stats.t.ppf(0.975, 3) * (np.var(gains, ddof=1) * (1 / 4 + 1 / 3)) ** 0.5
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half))
    assert compute_split_interval([1.0], 0.25) is None


def test_rows_are_resampled_within_clients() -> None:
    """One client of 40 rows, of which the method has 10 right that its reference has wrong, none the other way."""
    y = [0] * 40
    mine, other = predicted(y, [0] * 40), predicted(y, [1] * 10 + [0] * 30)
    low, high = resample_rows([(mine, other)], "accuracy")
    assert low == pytest.approx(0.25 - 1.96 * (0.25 * 0.75 / 40) ** 0.5, abs=0.03)
    assert high == pytest.approx(0.25 + 1.96 * (0.25 * 0.75 / 40) ** 0.5, abs=0.03)
    assert resample_rows([(other, other)], "accuracy") == (0.0, 0.0)


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
