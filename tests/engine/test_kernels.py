"""Faster calls with the results of PyTorch's own."""

from typing import Any

import pytest
import torch
from engine_rounds import Watch
from torch import nn

from fedattune.engine.kernels import FastPrediction, max_pool_with_indices

aten = torch.ops.aten


POOLINGS = [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([2, 2], [2, 2], [0, 0], [1, 1], True)]
IMAGES = [(2, 1), (7, 1), (60, 6), (2, 8)]
"""Images and their channels: too few to put together, a number without divisors, six groups of ten, enough channels."""


@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("images", IMAGES)
def test_pooling_channel_by_channel_gives_the_same_values_and_places(images: tuple[int, int], how: Any) -> None:
    x = torch.randint(-2, 3, (*images, 7, 9)).double()  # many ties
    for a, b in zip(max_pool_with_indices(x, *how), aten.max_pool2d_with_indices(x, *how), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()


@pytest.mark.parametrize("how", [*POOLINGS, (2,), ((2, 2), None, 0, 1, True), (2, 1), (2, 2, 1), (2, 2, 0, 2), (3,)])
@pytest.mark.parametrize("size", [(2, 1, 7, 9), (60, 6, 7, 9), (2, 8, 6, 8), (3, 8, 9)])
def test_pooling_in_predictions_gives_the_same_values(size: tuple[int, ...], how: Any) -> None:
    x = torch.randn(size)
    x[0, 0, 0] = torch.nan
    with FastPrediction():
        pooled = torch.nn.functional.max_pool2d(x, *how)
    assert pooled.is_contiguous()
    torch.testing.assert_close(pooled, torch.nn.functional.max_pool2d(x, *how), rtol=0, atol=0, equal_nan=True)


def test_images_that_are_too_small_to_pool_are_refused_in_predictions_too() -> None:
    with FastPrediction(), pytest.raises(RuntimeError, match="Output size is too small"):
        torch.nn.functional.max_pool2d(torch.randn(2, 6, 1, 4), 2)


def test_maxima_of_four_pixels_take_two_operations() -> None:
    with Watch() as seen, FastPrediction():
        torch.nn.functional.max_pool2d(torch.randn(5, 6, 8, 8), 2)
    assert seen.operations["aten.maximum.default"] == 2
    assert seen.operations["aten.max_pool2d_with_indices.default"] == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_predicts_the_same_where_faster_calls_are_made(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.core.dense.choose", lambda what, sizes, calls, *min_gain: "oneDNN")
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(968, 10, bias=bias), nn.ReLU(), nn.Linear(10, 3)
    )
    x = torch.randn(77, 1, 24, 24)
    with torch.no_grad(), Watch() as seen, FastPrediction():
        got = net(x)
    assert seen.operations["mkldnn._linear_pointwise.default"] == 1  # the second layer is too small
    assert seen.operations["aten.maximum.default"] == 2
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)
