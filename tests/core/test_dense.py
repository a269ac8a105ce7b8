"""Products by either library are the same up to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedattune.core import dense

ROWS = 30


@pytest.fixture(params=[dense.PYTORCH, dense.ONEDNN])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both libraries in turn; the operations that were asked for."""
    asked: list[str] = []

    def choose(what: str, sizes: Any, calls: Any) -> str:
        asked.append(what)
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
    assert library == ["linear"]


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


def test_other_tensors_are_multiplied_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "choose", lambda *_: pytest.fail("oneDNN is no choice here"))
    x, w = torch.randn(ROWS, 600), torch.randn(20, 600)
    learned = w.clone().requires_grad_()
    linear, same = functional.linear, torch.testing.assert_close
    same(dense.linear(x.double(), w.double()), linear(x.double(), w.double()))
    same(dense.linear(x[0], w), linear(x[0], w))
    same(dense.linear(x, w[0]), linear(x, w[0]))
    same(dense.linear(x[:, ::2], w[:, ::2]), linear(x[:, ::2], w[:, ::2]))
    assert dense.linear(x, learned).requires_grad
    each: Tensor = vmap(dense.linear)(x.expand(3, ROWS, 600), w.expand(3, 20, 600))
    same(each[0], linear(x, w))
    same(dense.multiply(x[:, :40].double(), w.t()[:40].double()), x[:, :40].double() @ w.t()[:40].double())
    meta = torch.empty(ROWS, 600, device="meta")
    assert dense.linear(meta, torch.empty(20, 600, device="meta")).shape == (ROWS, 20)
    out = torch.zeros(20, 20).double()
    dense.add_dots(out, w.double(), w.double())
    same(out, w.double() @ w.double().t())
