"""Targets of several labels, numbers or positions: losses, scores and metrics against PyTorch and scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score, mean_squared_error, r2_score, recall_score, roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, huber_loss, l1_loss, mse_loss

from fedattune.core.errors import ConfigError
from fedattune.core.losses import compute_loss, compute_sample_losses, make_loss
from fedattune.core.metrics import compute_metrics, compute_recalls, compute_row_losses
from fedattune.core.settings import Settings
from fedattune.core.targets import find_kind
from fedattune.engine.base import Scores, score_block, score_samples
from fedattune.runs.store import pack_scores, unpack_scores


def _draw(kind: str, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of n rows."""
    torch.manual_seed(0)
    if kind == "labels":
        return torch.randn(n, 3, dtype=torch.float64), torch.rand(n, 3) > 0.5
    if kind == "numbers":
        return torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 3)
    return torch.randn(n, 4, 5, 6, dtype=torch.float64), torch.randint(0, 4, (n, 5, 6))


def test_losses_are_those_of_pytorch() -> None:
    outputs, y = _draw("labels")
    expected = binary_cross_entropy_with_logits(outputs, y.double())
    torch.testing.assert_close(compute_loss(outputs, (outputs, y)), expected)
    outputs, y = _draw("numbers")
    torch.testing.assert_close(compute_loss(outputs.float(), (outputs, y)), mse_loss(outputs.float(), y))
    outputs, y = _draw("positions")
    torch.testing.assert_close(compute_loss(outputs, (outputs, y)), cross_entropy(outputs, y))


@pytest.mark.parametrize("kind", ["labels", "numbers", "positions"])
def test_padding_does_not_count(kind: str) -> None:
    outputs, y = _draw(kind)
    weight = (torch.arange(len(y)) < 7).double()
    expected = compute_loss(outputs[:7], (outputs[:7], y[:7]))
    torch.testing.assert_close(compute_loss(outputs, (outputs, y, weight)), expected, check_dtype=False)


def test_ignored_positions_do_not_count() -> None:
    outputs, y = _draw("positions", 2)
    y[0, :, 3:] = -100
    y[1] = -100
    losses = compute_sample_losses(outputs, y)
    torch.testing.assert_close(losses[0], cross_entropy(outputs[:1, :, :, :3], y[:1, :, :3]))
    assert losses[1] == 0
    right, _ = score_samples(outputs, y, "positions")
    counted = y[0, :, :3] == outputs[0, :, :, :3].argmax(0)
    assert right.tolist() == pytest.approx([float(counted.double().mean()), 0.0])
    one, truth = outputs[:1].numpy(), y[:1].numpy()
    assert compute_metrics(truth, one)["position_accuracy"] == pytest.approx(float(counted.double().mean()))
    assert compute_metrics(truth, one)["log_loss"] == pytest.approx(float(losses[0]))


def test_rows_count_by_the_share_of_right_parts() -> None:
    y = torch.tensor([[True, False, True], [False, False, False]])
    right, _ = score_samples(torch.tensor([[2.0, 1.0, 3.0], [-1.0, -1.0, 1.0]]), y, "labels")
    assert right.tolist() == pytest.approx([2 / 3, 2 / 3])
    outputs, y = _draw("positions")
    block = [t.view(3, 4, *t.shape[1:]) for t in (outputs, y)]
    expected = score_samples(outputs, y, "positions")
    for got, want in zip(score_block(*block, "positions"), expected, strict=True):
        assert got.shape == (3, 4)
        torch.testing.assert_close(got.flatten(), want)


def test_metrics_of_labels_are_those_of_scikit_learn() -> None:
    outputs, y = (one.numpy() for one in _draw("labels", 40))
    found, predicted = compute_metrics(y, outputs), outputs > 0
    assert found["label_accuracy"] == pytest.approx((predicted == y).mean())
    assert found["subset_accuracy"] == pytest.approx((predicted == y).all(axis=1).mean())
    assert found["micro_f1"] == pytest.approx(f1_score(y, predicted, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro"))
    assert found["macro_auc"] == pytest.approx(roc_auc_score(y, outputs, average="macro"))
    loss = binary_cross_entropy_with_logits(torch.from_numpy(outputs), torch.from_numpy(y).double())
    assert found["log_loss"] == pytest.approx(float(loss))
    assert compute_row_losses(y, outputs, "log_loss").mean() == pytest.approx(float(loss))
    assert 1 - compute_row_losses(y, outputs, "micro_f1").mean() == pytest.approx(found["label_accuracy"])


def test_labels_without_two_values_have_no_auc() -> None:
    y = np.array([[True, False], [True, True], [True, False]])
    outputs = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 1.0]])
    assert compute_metrics(y, outputs)["macro_auc"] == 1.0  # of the second label alone
    assert np.isnan(compute_metrics(y[:, :1], outputs[:, :1])["macro_auc"])
    assert np.isnan(compute_metrics(np.zeros((2, 2), dtype=bool), -np.ones((2, 2)))["micro_f1"])


def test_metrics_of_several_numbers_are_means_over_them() -> None:
    outputs, y = (one.numpy() for one in _draw("numbers", 30))
    found = compute_metrics(y, outputs)
    assert found["r2"] == pytest.approx(r2_score(y, outputs))
    assert found["rmse"] == pytest.approx(mean_squared_error(y, outputs) ** 0.5)
    assert found["mae"] == pytest.approx(np.abs(y - outputs).mean())
    assert compute_row_losses(y, outputs, "rmse").mean() ** 0.5 == pytest.approx(found["rmse"])


def test_metrics_of_positions_are_those_of_scikit_learn() -> None:
    outputs, y = (one.numpy() for one in _draw("positions", 10))
    found, predicted = compute_metrics(y, outputs), outputs.argmax(axis=1)
    assert found["position_accuracy"] == pytest.approx((predicted == y).mean())
    assert found["mean_iou"] == pytest.approx(jaccard_score(y.ravel(), predicted.ravel(), average="macro"))
    assert 1 - compute_row_losses(y, outputs, "mean_iou").mean() == pytest.approx(found["position_accuracy"])


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        (torch.zeros(2, dtype=torch.int64), "class"),
        (torch.zeros(2), "number"),
        (torch.zeros(2, 3, dtype=torch.bool), "labels"),
        (np.zeros((2, 3)), "numbers"),
        (np.zeros((2, 3), dtype=np.int64), "positions"),
    ],
)
def test_type_and_shape_tell_the_kind(y: Any, kind: str) -> None:
    assert find_kind(y) == kind


def test_the_store_keeps_whole_and_fractional_scores() -> None:
    n, loss = torch.tensor([4, 6]), torch.tensor([0.5, 2.5], dtype=torch.float64)
    for correct in (torch.tensor([3, 5]), torch.tensor([2.75, 1 / 3], dtype=torch.float64)):
        clients, values = unpack_scores(pack_scores(np.array([2, 7]), Scores(n, correct, loss)))
        assert clients.tolist() == [2, 7]
        assert values.tolist() == [n.tolist(), correct.tolist(), loss.tolist()]


def test_other_losses_are_means_over_parts() -> None:
    outputs, y = _draw("numbers")
    outputs = outputs.float()
    for name, expected in (("absolute", l1_loss(outputs, y)), ("huber", huber_loss(outputs, y))):
        loss = make_loss(Settings(loss=name).loss, (), "numbers", (3,)).bind(None)
        torch.testing.assert_close(loss(outputs, (outputs, y)), expected)
    for kind, shape in (("labels", (3,)), ("positions", (4, 5, 6))):
        outputs, y = _draw(kind)
        each = binary_cross_entropy_with_logits(outputs, y.double(), reduction="none") if kind == "labels" else None
        each = cross_entropy(outputs, y, reduction="none") if each is None else each
        focal = make_loss(Settings(loss="focal").loss, ("a",) * 4 if kind == "positions" else (), kind, shape)
        expected = ((1 - (-each).exp()) ** 2 * each).mean()
        torch.testing.assert_close(focal.bind(None)(outputs, (outputs, y)), expected)


def test_losses_that_do_not_suit_several_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss: got huber, and the target is several labels, which takes auto"):
        make_loss(Settings(loss="huber").loss, (), "labels", (3,))
    with pytest.raises(ConfigError, match=r"label_smoothing: got 0.1, and the target is a class for each position"):
        make_loss(Settings(label_smoothing=0.1).loss, ("a", "b"), "positions", (2, 3))


def test_recalls_of_labels_and_positions_are_those_of_scikit_learn() -> None:
    outputs, y = (one.numpy() for one in _draw("labels", 30))
    assert compute_recalls(y, outputs).tolist() == pytest.approx(recall_score(y, outputs > 0, average=None).tolist())
    outputs, y = (one.numpy() for one in _draw("positions"))
    expected = recall_score(y.ravel(), outputs.argmax(axis=1).ravel(), average=None)
    assert compute_recalls(y, outputs).tolist() == pytest.approx(expected.tolist())
