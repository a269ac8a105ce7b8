"""Products by either library are the same up to rounding."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from fedattune.core import dense

ROWS = 30


@pytest.fixture(params=[dense.PYTORCH, dense.ONEDNN])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both libraries in turn; the operations that were asked for."""
    asked: list[str] = []

    def choose(what: str, sizes: Any, calls: Any, min_gain: float = 1.15) -> str:
        asked.append(what)
        assert min_gain == (1.05 if what == "linear layer" else 1.15)
        torch.testing.assert_close(*(call() for call in calls.values()), rtol=1e-4, atol=1e-3)
        return str(request.param)

    monkeypatch.setattr(dense, "choose", choose)
    monkeypatch.setattr(dense, "BLOCK_VALUES", 2000)  # several blocks
    return asked


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer(library: list[str], is_turned: bool, has_bias: bool) -> None:
    x, w = torch.randn(ROWS, 600), torch.randn(600, 20).t() if is_turned else torch.randn(20, 600)
    bias = torch.randn(20) if has_bias else None
    torch.testing.assert_close(dense.linear(x, w, bias), functional.linear(x, w, bias), rtol=1e-4, atol=1e-3)
    assert library == ["linear layer"]


@pytest.mark.parametrize(("rows", "measured"), [(40, 40), (200, 100)])
def test_as_many_rows_are_measured_as_the_limit_allows(
    rows: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of few rows stay in caches, and say little about many."""
    shapes = []

    def choose(what: str, sizes: Any, calls: Any, min_gain: float) -> str:
        shapes.extend(call().shape for call in calls.values())
        return dense.ONEDNN

    monkeypatch.setattr(dense, "choose", choose)
    monkeypatch.setattr(dense, "MEASURED_PRODUCTS", 100 * 600 * 20)
    x, w = torch.randn(rows, 600), torch.randn(20, 600)
    assert len(dense.linear(x, w)) == rows
    assert shapes == [(measured, 20)] * 2


def test_mixtures_of_models(library: list[str]) -> None:
    weights, models = torch.randn(ROWS, 40), torch.randn(40, 1300)
    torch.testing.assert_close(dense.multiply(weights, models), weights @ models, rtol=1e-4, atol=1e-3)
    out = torch.full((ROWS, 1300), torch.nan)
    assert dense.multiply(weights[:, :], models, out) is out
    torch.testing.assert_close(out, weights @ models, rtol=1e-4, atol=1e-3)
    spread = torch.randn(40, 2600)[:, ::2]
    torch.testing.assert_close(dense.multiply(weights, spread), weights @ spread, rtol=1e-4, atol=1e-3)
    assert library == ["multiply"] * 3


def test_dot_products_are_added(library: list[str]) -> None:
    a, b = torch.randn(ROWS, 1300), torch.randn(40, 1300)
    for x, y in ((a, b), (b, b), (b[:ROWS], b)):
        out = torch.ones(len(x), len(y))
        dense.add_dots(out, x, y)
        torch.testing.assert_close(out, 1 + x @ y.t(), rtol=1e-4, atol=1e-3)
    assert library == ["dots"] * 3
