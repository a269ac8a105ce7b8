"""Metrics agree with scikit-learn, and are not a number where rows do not define them."""

import numpy as np
import pytest
from sklearn import metrics as sk

from fedattune import ConfigError
from fedattune.core.metrics import METRICS, check_metric, compute_metrics, compute_probabilities, compute_row_losses


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
        }
    )


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
    assert check_metric("auc", is_regression=False) is METRICS["auc"]
    with pytest.raises(
        ConfigError, match="metric: got 'auc', expected one of r2, mae, rmse, as the target is a number"
    ):
        check_metric("auc", is_regression=True)
    with pytest.raises(ConfigError, match=r"got .mae., expected one of accuracy, .*a class"):
        check_metric("mae", is_regression=False)
