"""Losses of local training: their values beside PyTorch's, and the sentences of the ones that do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedattune import ConfigError
from fedattune.core.losses import compute_loss, make_loss
from fedattune.core.settings import Settings

CLASSES = ("a", "b", "c")


def take_loss(outputs: Tensor, batch: tuple[Tensor, ...], weights: Tensor | None = None, **settings: Any) -> Tensor:
    classes = () if batch[1].is_floating_point() else CLASSES
    return make_loss(Settings(**settings).loss, classes).bind(weights)(outputs, batch)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


@pytest.fixture
def y() -> Tensor:
    return torch.tensor([0, 1, 2, 2, 2, 0, 1])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)])
def test_cross_entropy_is_that_of_pytorch(smoothing: float, weights: Tensor | None, logits: Tensor, y: Tensor) -> None:
    """Padding has weight 0 and does not count, in the losses and in the weights of the mean."""
    x = torch.zeros(7, 1)
    want = F.cross_entropy(logits, y, weight=weights, label_smoothing=smoothing)
    got = take_loss(logits, (x, y), weights, label_smoothing=smoothing)
    torch.testing.assert_close(got, want)
    padded = torch.tensor([1.0, 1, 1, 1, 0, 0, 1], dtype=torch.float64)
    kept = padded > 0
    want = F.cross_entropy(logits[kept], y[kept], weight=weights, label_smoothing=smoothing)
    torch.testing.assert_close(take_loss(logits, (x, y, padded), weights, label_smoothing=smoothing), want)


def test_losses_of_numbers_are_those_of_pytorch() -> None:
    outputs = torch.tensor([[0.5], [-3.0], [2.0], [9.0]], dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 2.5, 0.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    for settings, want in (
        ({"loss": "absolute"}, F.l1_loss(outputs[:3, 0], y[:3])),
        ({"loss": "huber"}, F.huber_loss(outputs[:3, 0], y[:3])),
        ({"loss": "huber", "huber_delta": 2.5}, F.huber_loss(outputs[:3, 0], y[:3], delta=2.5)),
        ({}, F.mse_loss(outputs[:3, 0], y[:3])),
    ):
        torch.testing.assert_close(take_loss(outputs, (outputs, y, weight), **settings), want)
        torch.testing.assert_close(take_loss(outputs[:3], (outputs, y[:3]), **settings), want)


def test_the_focal_loss_by_hand() -> None:
    """Probabilities 1/4 and 3/4: (3/4)^2 log 4 and (1/4)^2 log(4/3); the weights 1 and 3 weigh the mean."""
    logits = torch.tensor([[0.0, np.log(3.0), -1e9], [0.0, np.log(3.0), -1e9]], dtype=torch.float64)
    y, x = torch.tensor([0, 1]), torch.zeros(2, 1)
    first, second = 9 / 16 * np.log(4), 1 / 16 * np.log(4 / 3)
    assert float(take_loss(logits, (x, y), loss="focal")) == pytest.approx((first + second) / 2)
    weights = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    assert float(take_loss(logits, (x, y), weights, loss="focal")) == pytest.approx((first + 3 * second) / 4)
    padded = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert float(take_loss(logits, (x, y, padded), loss="focal")) == pytest.approx(second)
    plain = take_loss(logits, (x, y), loss="focal", focal_gamma=0.0)
    torch.testing.assert_close(plain, F.cross_entropy(logits, y))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_focal_loss_has_a_gradient_at_certainty(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    take_loss(logits, (logits, torch.tensor([0])), loss="focal", focal_gamma=gamma).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(1, 3))


def test_without_options_nothing_changes(logits: Tensor, y: Tensor) -> None:
    loss = make_loss(Settings().loss, CLASSES)
    assert loss.bind(None) is compute_loss
    assert loss.bind(None, is_mean=False) is compute_loss
    assert not loss.has_class_weights


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    """10 rows of 3 classes: 10 / (3 count). A class that a client lacks has weight 1, and the others are 2 classes."""
    loss = make_loss(Settings(class_weights="balanced").loss, CLASSES)
    assert loss.is_balanced
    got = loss.make_class_weights(np.array([[6, 3, 1], [0, 2, 8], [0, 0, 0]]))
    np.testing.assert_allclose(got, [[10 / 18, 10 / 9, 10 / 3], [1, 10 / 4, 10 / 16], [1, 1, 1]])


@pytest.mark.parametrize(
    "given",
    [
        "0.2,1,3",
        [0.2, 1, 3],
        np.array([0.2, 1, 3]),
        torch.tensor([0.2, 1, 3], dtype=torch.float64),
        {"c": 3, "a": 0.2, "b": 1.0},
        " c=3, b=1,a=0.2 ",
    ],
)
def test_class_weights_are_numbers_or_names(given: Any) -> None:
    settings = Settings(class_weights=given)
    assert make_loss(settings.loss, CLASSES).make_class_weights(np.ones((2, 3), int)).tolist() == [[0.2, 1, 3]] * 2
    again = Settings(**settings.to_keywords(mode="json", exclude_defaults=True))
    assert again == settings  # as a stored run has it


def test_weights_name_classes_with_commas() -> None:
    settings = Settings(class_weights={"low": 1, "high, bad": 3, "a=b": 0.5})
    made = make_loss(settings.loss, ("high, bad", "a=b", "low")).make_class_weights(np.ones((1, 3), int))
    assert made.tolist() == [[3, 0.5, 1]]


@pytest.mark.parametrize(
    ("settings", "classes", "sentence"),
    [
        ({"loss": "huber"}, CLASSES, "loss: got huber, and the target is a class, which takes auto .* or focal"),
        ({"loss": "absolute"}, CLASSES, "loss: got absolute, and the target is a class"),
        ({"loss": "focal"}, (), r"loss: got focal, and the target is a number, which takes auto .* or huber"),
        ({"class_weights": "balanced"}, (), "class_weights: got balanced, and the target is a number"),
        ({"label_smoothing": 0.1}, (), "label_smoothing: got 0.1, and the target is a number"),
        ({"class_weights": "1,2"}, CLASSES, "class_weights: got 2 numbers, expected one for each of the 3 classes"),
        ({"class_weights": "a=1,d=2"}, CLASSES, "class_weights: no class is called d, expected a weight"),
        ({"class_weights": "a=1,b=2"}, CLASSES, "class_weights: none is for c, expected a weight for each"),
        ({"class_weights": "0,1,1"}, CLASSES, "class_weights: expected balanced, one number above 0 per class"),
        ({"class_weights": "a=1,2"}, CLASSES, "class_weights: expected balanced, one number above 0 per class"),
        ({"class_weights": "many"}, CLASSES, "class_weights: expected balanced, one number above 0 per class"),
        ({"label_smoothing": 1.0}, CLASSES, "label_smoothing: input should be less than 1"),
        ({"focal_gamma": 1.0}, CLASSES, "focal_gamma: it needs loss focal, and the loss is auto"),
        ({"huber_delta": 2.0}, (), "huber_delta: it needs loss huber, and the loss is auto"),
        ({"loss": "focal", "label_smoothing": 0.1}, CLASSES, "label_smoothing: it needs loss auto, and the loss is"),
        ({"loss": "hinge"}, CLASSES, "loss: expected auto, focal, absolute, huber, or a custom loss as file.py:loss"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(settings: Any, classes: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_loss(Settings.from_keywords(**settings).loss, classes)


OWN = """
import torch
from torch.nn.functional import cross_entropy

def soft(outputs, y):
    return cross_entropy(outputs, y, reduction="none") ** 2

def mean(outputs, y):
    return cross_entropy(outputs, y)

def centred(outputs, y):
    losses = cross_entropy(outputs, y, reduction="none")
    return losses - losses.mean()

def cut(outputs, y):
    return cross_entropy(outputs, y, reduction="none").detach()

def broken(outputs, y):
    return outputs @ outputs

def nothing(outputs, y):
    return None
"""


def test_a_custom_loss_returns_one_loss_per_sample(tmp_path: Path, logits: Tensor, y: Tensor) -> None:
    file = tmp_path / "own_losses.py"
    file.write_text(OWN)
    got = take_loss(logits, (logits, y), loss=f"{file}:soft")
    torch.testing.assert_close(got, (F.cross_entropy(logits, y, reduction="none") ** 2).mean())
    for name, sentence in {
        "mean": r"mean returned \(\) for 2 samples, expected the loss of each, \(2,\)",
        "centred": "centred, the loss of a sample depends on the other samples",
        "cut": "cut gives no gradient",
        "broken": r"broken fails on outputs \(2, 3\) and targets \(2,\): RuntimeError",
        "nothing": "nothing returned NoneType",
        "absent": "has no function 'absent'",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            take_loss(logits, (logits, y), loss=f"{file}:{name}")
