"""Metrics agree with scikit-learn, and are not a number where rows do not define them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sk

from fedattune import ConfigError
from fedattune.core.metrics import (
    METRICS,
    Metric,
    check_metric,
    compute_metrics,
    compute_probabilities,
    compute_recalls,
    compute_row_losses,
    try_metric,
)


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_metrics_of_classes_agree_with_scikit_learn(n_classes: int) -> None:
    random = np.random.default_rng(n_classes)
    y = random.integers(0, n_classes, 200)
    logits = np.round(random.normal(size=(200, n_classes)) + 2 * np.eye(n_classes)[y], 1)  # with ties
    found, chance, predicted = compute_metrics(y, logits), compute_probabilities(logits), logits.argmax(1)
    area = (
        sk.roc_auc_score(y, logits[:, 1] - logits[:, 0])
        if n_classes == 2
        else sk.roc_auc_score(y, chance, multi_class="ovr")
    )
    assert found == pytest.approx(
        {
            "accuracy": sk.accuracy_score(y, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
            "auc": area,
            "f1": sk.f1_score(y, predicted, average="macro"),
            "log_loss": sk.log_loss(y, chance),
            "calibration_error": compute_calibration_error(y, chance),
        }
    )


def compute_calibration_error(y: NDArray[np.int64], chance: NDArray[np.float64]) -> float:
    """The loop over bins of the usual code: a bin has its upper limit."""
    confidence, right = chance.max(axis=1), chance.argmax(axis=1) == y
    error = 0.0
    for low in np.linspace(0, 1, 16)[:-1]:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(error)


def test_the_calibration_error_by_hand() -> None:
    """Three rows with probability 3/4, two of them right, and one sure and wrong row: 3/4 |2/3 - 3/4| + 1/4 |0 - 1|."""
    logits = np.log(np.array([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0], [1e30, 1.0]]))
    found = compute_metrics(np.array([0, 1, 1, 1]), logits, ["calibration_error"])["calibration_error"]
    assert found == pytest.approx(3 / 4 * abs(2 / 3 - 3 / 4) + 1 / 4)
    assert np.isnan(
        compute_metrics(np.array([0]), np.array([[np.nan, 0.0]]), ["calibration_error"])["calibration_error"]
    )
    assert METRICS["calibration_error"].format_gap(-0.02, signed=True) == "-2.00 points"


def test_recalls_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(2)
    y, logits = random.integers(0, 3, 40), random.normal(size=(40, 4))
    found = compute_recalls(y, logits)
    np.testing.assert_allclose(found[:3], sk.recall_score(y, logits.argmax(1), labels=[0, 1, 2], average=None))
    assert np.isnan(found[3])


def test_a_broken_metric_is_found_before_training() -> None:
    def make(function: Any) -> Metric:
        return Metric("mine", function, "mine", is_higher_better=True, is_percent=False, kinds=("class",))

    try_metric(make(lambda y, logits: float(logits[y == 2].mean())), "class", (3,))
    try_metric(make(lambda y, predicted: np.float32("nan")), "number", (1,))
    for function, reason in (
        (lambda y, logits: logits[:, 7].mean(), "IndexError: index 7 is out of bounds"),
        (lambda y, logits: logits.mean(axis=0), "TypeError: only"),
        (lambda y, logits: None, "TypeError: float"),
    ):
        with pytest.raises(ConfigError, match=rf"metric mine: it fails on 6 rows with outputs \(6, 3\): {reason}"):
            try_metric(make(function), "class", (3,))


def test_metrics_of_numbers_agree_with_scikit_learn() -> None:
    random = np.random.default_rng(0)
    y, outputs = random.normal(size=50), random.normal(size=(50, 1))
    assert compute_metrics(y, outputs) == pytest.approx(
        {
            "r2": sk.r2_score(y, outputs[:, 0]),
            "mae": sk.mean_absolute_error(y, outputs[:, 0]),
            "rmse": sk.root_mean_squared_error(y, outputs[:, 0]),
        }
    )


def test_what_rows_do_not_define_is_not_a_number() -> None:
    one_class = compute_metrics(np.array([1, 1]), np.array([[0.0, 1.0], [2.0, 1.0]]))
    assert np.isnan(one_class["auc"])
    assert one_class["accuracy"] == one_class["balanced_accuracy"] == 0.5
    assert np.isnan(compute_metrics(np.array([1.0, 1.0]), np.zeros((2, 1)))["r2"])
    assert all(map(np.isnan, compute_metrics(np.zeros(0, dtype=np.int64), np.zeros((0, 2))).values()))
    diverged = compute_metrics(np.array([0, 1]), np.array([[np.nan, 0.0], [0.0, 1.0]]))
    assert np.isnan(diverged["auc"])


def test_means_over_rows_are_means_of_row_losses() -> None:
    random = np.random.default_rng(1)
    y, logits = random.integers(0, 3, 30), random.normal(size=(30, 3))
    found = compute_metrics(y, logits)
    assert compute_row_losses(y, logits, "log_loss").mean() == pytest.approx(found["log_loss"])
    assert 1 - compute_row_losses(y, logits, "auc").mean() == pytest.approx(found["accuracy"])
    target, outputs = random.normal(size=30), random.normal(size=(30, 1))
    found = compute_metrics(target, outputs)
    assert compute_row_losses(target, outputs, "mae").mean() == pytest.approx(found["mae"])
    assert compute_row_losses(target, outputs, "rmse").mean() ** 0.5 == pytest.approx(found["rmse"])


def test_a_metric_suits_its_target() -> None:
    assert check_metric("auc", "class") is METRICS["auc"]
    with pytest.raises(
        ConfigError, match="metric: got 'auc', expected one of r2, mae, rmse, as the target is a number"
    ):
        check_metric("auc", "number")
    with pytest.raises(ConfigError, match=r"got .mae., expected one of accuracy, .*a class"):
        check_metric("mae", "class")
