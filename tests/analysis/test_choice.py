"""Methods are chosen on validation data in which every client counts as it does in the test."""

import numpy as np
import pytest

from fake_results import Fake, results
from fedattune.analysis.compare import group_by_algorithm
from fedattune.analysis.verdict import Choice, reach_verdict, score_methods
from fedattune.runs.predictions import RowPredictions

LARGE, SMALL = 4, 16
N_TRAIN = [90] * LARGE + [3] * SMALL
HELD = [10] * LARGE + [1, 0, 0, 0] * (SMALL // 4)
"""Validation rows: all large clients have some; of the small ones, with 3 or 4 rows, about 4 in 10."""


def fake(name: str, large: float, small: float) -> Fake:
    """A method with these accuracies on large and small clients, on validation and on test rows."""
    values = [large] * LARGE + [small] * SMALL
    return Fake(name, values, n_train=N_TRAIN, n_validation=HELD, validations=values)


def test_the_choice_is_that_of_all_clients() -> None:
    """On clients with validation rows alone, `large` would have 0.7 and `small` 0.65; on all, 0.56 and 0.74."""
    local, large, small = fake("local", 0.5, 0.5), fake("large", 0.9, 0.5), fake("small", 0.5, 0.8)
    runs = results(local, large, small)
    scores = score_methods(group_by_algorithm(runs), runs, "accuracy").scores
    assert scores["large"] == pytest.approx((4 * 0.9 + 10 * 0.5) / 14)
    assert scores["small"] == pytest.approx((4 * 0.5 + 10 * 0.8) / 14)
    verdict = reach_verdict(runs, is_tuned=True)
    assert (verdict.answer, verdict.method) == ("yes", "small")


def test_the_chance_of_a_validation_row_is_unbiased() -> None:
    """Over many splits, the weighted mean over clients with validation rows is the mean over all clients."""
    from fedattune.data.splits import compute_part_sizes, validation_weights

    n = np.array([4, 5, 8, 12, 40, 200] * 50)
    value = np.where(n < 10, 0.2, 0.9)  # what a method has on such a client
    totals = []
    for seed in range(300):
        sizes = np.array([compute_part_sizes(int(k), 0.25, 0.1, stream=[seed, u, 0]) for u, k in enumerate(n)])
        weights = validation_weights(sizes[:, 0], sizes[:, 1], 0.1)
        totals.append(np.average(value, weights=weights))
    assert np.mean(totals) == pytest.approx(value.mean(), abs=0.01)


def test_a_client_on_which_one_method_has_no_value_counts_for_none() -> None:
    """`a` diverged on client 1, whose rows are hard: without that client it would look better than it is."""
    y = np.array([0.0, 1.0, 10.0, 20.0])
    owner = np.array([0, 0, 1, 1], dtype=np.int32)

    def make(name: str, said: list[float]) -> Fake:
        rows = RowPredictions(owner, np.arange(4), y, np.array(said, dtype=np.float32)[:, None], 2)
        made = Fake(name, [1.0, 1.0], is_regression=True, predictions={"validation": rows})
        made.measure_clients = lambda metric, part="test": rows.measure_clients(metric)  # type: ignore[method-assign]
        return made

    runs = results(
        make("local", [1.0, 2.0, 20.0, 30.0]),  # errors 1 and 10
        make("a", [2.0, 3.0, np.nan, np.nan]),  # errors 2 and none
    )
    choice = score_methods(group_by_algorithm(runs), runs, "rmse")
    assert choice.scores == pytest.approx({"local": -1.0, "a": -2.0})
    assert choice.find_best(["local", "a"]) == "local"


def test_validation_rows_that_define_a_metric_only_together_are_measured_together() -> None:
    """With one row each, no client has an AUC; the test rows must not choose in their place."""
    owner, number = np.arange(4, dtype=np.int32), np.arange(4)

    def make(name: str, said: list[float], y: list[int]) -> Fake:
        outputs = np.stack([np.zeros(4), np.array(said)], 1).astype(np.float32)
        rows = RowPredictions(owner, number, np.array(y), outputs, 4)
        made = Fake(name, [0.9 if name == "local" else 0.1] * 4, predictions={"validation": rows})
        made.measure_for_choice = lambda metric: rows.measure_clients(metric)  # type: ignore[method-assign]
        return made

    def choose(y: list[int]) -> Choice:
        runs = results(make("local", [1.0, 3.0, 2.0, 0.0], y), make("a", [-2.0, 1.0, -1.0, 2.0], y))
        return score_methods(group_by_algorithm(runs), runs, "auc")

    choice = choose([0, 1, 0, 1])
    assert choice.scores == pytest.approx({"local": 0.5, "a": 1.0})
    assert choice.criterion == "validation AUC of all rows together"
    one_class = choose([0, 0, 0, 0])  # no AUC at all
    assert one_class.criterion == "validation accuracy"
    assert one_class.scores == pytest.approx({"local": 0.25, "a": 0.5})
