"""Faster calls with the results of PyTorch's own."""

from typing import Any

import pytest
import torch
from engine_rounds import Watch
from torch import nn

from fedattune.training.engine.kernels import (
    FastPrediction,
    linear_in_blocks,
    max_pool_with_indices,
    multiply_narrow,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    "how", [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([2, 2], [2, 2], [0, 0], [1, 1], True)]
)
@pytest.mark.parametrize("channels", [1, 8])
def test_pooling_channel_by_channel_gives_the_same_values_and_places(channels: int, how: Any) -> None:
    x = torch.randint(-2, 3, (2, channels, 7, 9)).double()  # many ties
    for a, b in zip(max_pool_with_indices(x, *how), aten.max_pool2d_with_indices(x, *how), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()


def test_logits_of_many_inputs_are_the_same_by_the_faster_product() -> None:
    x, w = torch.randn(3, 20, 600), torch.randn(3, 10, 600)
    assert multiply_narrow(x[:, :10], w.transpose(1, 2)) is NotImplemented  # not faster
    assert multiply_narrow(x[:, :, :10], w[:, :, :10].transpose(1, 2)) is NotImplemented
    torch.testing.assert_close(
        multiply_narrow(x, w.transpose(1, 2)), x @ w.transpose(1, 2), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("rows", [3, 24, 77])
@pytest.mark.parametrize("bias", [False, True])
def test_a_model_predicts_the_same_where_faster_calls_are_made(rows: int, bias: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(968, 10, bias=bias),
        nn.ReLU(),
        nn.Linear(10, 3),
    )
    x = torch.randn(rows, 1, 24, 24)
    with torch.no_grad(), Watch() as seen, FastPrediction():
        got = net(x)
    assert seen.operations["aten.bmm.out"] == (rows >= 24)
    assert seen.operations["aten.clone.default"] == 2  # channels beside each other, and back
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)


def test_calls_that_are_not_made_faster_stay_as_they_are() -> None:
    x, w, image = torch.randn(30, 600), torch.randn(4, 600), torch.randn(2, 8, 6, 6)
    functional = nn.functional
    calls = (
        lambda: functional.linear(input=x, weight=w, bias=None),
        lambda: functional.linear(x, w[0]),
        lambda: functional.max_pool2d(input=image, kernel_size=2),
        lambda: functional.max_pool2d(image, 2, return_indices=True)[1],
        lambda: functional.max_pool2d(image, 2, 2, 0, 1, False, True)[1],
        lambda: torch.max_pool2d(image, 2),
    )
    for call in calls:
        with torch.no_grad(), FastPrediction():
            got = call()
        torch.testing.assert_close(got, call(), rtol=1e-5, atol=1e-4)


def test_linear_layers_of_other_types_stay_as_they_are() -> None:
    x, w = torch.randn(30, 600).double(), torch.randn(4, 600).double()
    assert torch.equal(linear_in_blocks(x, w), nn.functional.linear(x, w))
    assert torch.equal(linear_in_blocks(x[0], w), nn.functional.linear(x[0], w))
