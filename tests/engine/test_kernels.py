"""Faster calls with the results of PyTorch's own."""

from typing import Any

import pytest
import torch
from engine_rounds import Watch
from torch import nn

from fedattune.engine.kernels import FastPrediction, max_pool_with_indices

aten = torch.ops.aten


@pytest.mark.parametrize("how", [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([2, 2], [2, 2], [0, 0], [1, 1], True)])
@pytest.mark.parametrize("channels", [1, 8])
def test_pooling_channel_by_channel_gives_the_same_values_and_places(channels: int, how: Any) -> None:
    x = torch.randint(-2, 3, (2, channels, 7, 9)).double()  # many ties
    for a, b in zip(max_pool_with_indices(x, *how), aten.max_pool2d_with_indices(x, *how), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()


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
    assert seen.operations["aten.clone.default"] == 2  # channels beside each other, and back
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)
