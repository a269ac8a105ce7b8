"""Rewriting rules of compiled steps: fewer operations, the same numbers."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedattune import Params
from fedattune.core.losses import compute_sample_losses
from fedattune.core.task import Task
from fedattune.engine.compiler.compile import apply_passes
from fedattune.engine.compiler.rewrites import _multiply_turned
from fedattune.engine.compiler.tracing import trace

aten = torch.ops.aten


def _targets(function: Any, *given_: Tensor) -> tuple[Counter[Any], Tensor, Tensor]:
    """The operations of a simplified function, what it gives, and what the function gives."""
    traced = trace(lambda *tensors: [function(*tensors)], [t.view_as(t) for t in given_])
    apply_passes(traced.graph)
    traced.recompile()
    return (
        Counter(n.target for n in traced.graph.nodes if n.op == "call_function"),
        *traced(*given_),
        function(*given_),
    )


def test_an_update_is_one_product_that_adds_into_the_weights() -> None:
    a = torch.randn(3, 4, 5)
    used, got, want = _targets(lambda w, d, x: w - 0.1 * torch.bmm(d, x), a, torch.randn(3, 4, 2), torch.randn(3, 2, 5))
    assert used == {aten.baddbmm.default: 1}
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scale", ["w - 0.3 * g", "w + g * 0.3", "0.3 * g + w"])
def test_a_scaled_sum_is_one_pass(scale: str) -> None:
    used, got, want = _targets(lambda w, g: eval(scale, {}, {"w": w, "g": g}), torch.randn(4), torch.randn(4))
    assert sum(used.values()) == 1
    torch.testing.assert_close(got, want)


def test_moving_towards_something_is_one_pass() -> None:
    used, got, want = _targets(lambda w, v: w - 0.3 * (w - v), torch.randn(4), torch.randn(4))
    assert used == {aten.lerp.Scalar: 1}
    torch.testing.assert_close(got, want)


PROXIMAL_STEPS = 4


def _layer_first(w: Tensor, x: Tensor) -> Tensor:
    return (w @ x.mT).mT


def _layer_last(w: Tensor, x: Tensor) -> Tensor:
    return x @ w.mT


def _steps_on(outputs: Any, parts: int, decay: float) -> Any:
    """Proximal steps of a layer w towards v, each on one of so many parts of the samples x in turn."""

    def steps(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        for k in range(PROXIMAL_STEPS):
            part = x.chunk(parts, -2)[k % parts]
            d = outputs(w, part).tanh()
            w = w - 0.02 * (d.mT @ part + decay * w + 0.5 * (w - v))
        return w

    return steps


def _of_inputs(inputs: int, *sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    *clients, outputs, samples = sizes
    return [torch.randn(*clients, n, inputs).double() for n in (outputs, outputs, samples)]


@pytest.mark.parametrize("outputs", [_layer_first, _layer_last])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(3, 5, 6), (5, 6)], ids=["three clients", "one client"])
def test_steps_on_one_batch_read_and_write_a_layer_once(outputs: Any, decay: float, sizes: tuple[int, ...]) -> None:
    given_ = _of_inputs(600, *sizes)
    used, got, want = _targets(_steps_on(outputs, 1, decay), *given_)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    products = {aten.bmm.default, aten.mm.default, aten.baddbmm.default, aten.addmm.default}
    # w x' and v x' and x x', then one small product for each later step, and one that writes w
    assert sum(used[p] for p in products) == 3 + (PROXIMAL_STEPS - 1) + 1


def test_the_gradient_of_the_loss_takes_few_operations() -> None:
    z, y = torch.randn(5, 4), torch.randint(0, 4, (5,))
    used, got, _ = _targets(grad(lambda z: compute_sample_losses(z, y).mean()), z)
    torch.testing.assert_close(got, grad(lambda z: nn.functional.cross_entropy(z, y))(z))
    views = {aten.unsqueeze.default, aten.view.default, aten.expand.default}
    assert sum(n for target, n in used.items() if target not in views) <= 12  # three of them constants


@pytest.mark.parametrize("faster", ["plain", "turned"])
def test_a_product_is_taken_in_the_order_that_was_measured(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def choose(what: str, sizes: tuple[int, ...], calls: Any) -> str:
        torch.testing.assert_close(*(call() for call in calls.values()))
        seen.append((what, sizes))
        return faster

    monkeypatch.setattr("fedattune.engine.compiler.rewrites.choose", choose)
    x, w, b = torch.randn(3, 20, 60), torch.randn(3, 10, 60), torch.randn(3, 1, 10)
    used, got, want = _targets(lambda x, w: torch.bmm(x, w.mT), x, w)
    assert seen == [("bmm", (3, 20, 60, 10))]
    assert used[aten.bmm.default] == (faster == "plain")
    torch.testing.assert_close(got, want)
    used, got, want = _targets(lambda x, w, b: b + torch.bmm(x, w.mT), x, w, b)
    assert used[_multiply_turned] == (faster == "turned")
    assert used[aten.baddbmm.default] == (faster == "plain")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rewritten_step_stays_on_the_device_of_its_tensors(device: str) -> None:
    """Without a GPU, `meta` stands for a device that is not the CPU: it refuses tensors of the CPU."""
    layers = (
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    task = Task(nn.Sequential(*layers))
    names = list(task.params)

    def step(*tensors: Tensor) -> list[Tensor]:
        def one(w: Params, *batch: Tensor) -> Params:
            for _ in range(3):
                w = w - 0.1 * (task.gradient(w, Params(), batch)[0] + 0.5 * w)
            return w

        w = Params(dict(zip(names, tensors, strict=False)))
        return list(vmap(one)(w, *tensors[len(names) :]).values())

    params = [torch.zeros(2, *task.params[name].shape, device=device) for name in names]
    x = torch.zeros(2, 4, 1, 8, 8, device=device)
    batch = [x, torch.zeros(2, 4, dtype=torch.int64, device=device), torch.ones(2, 4, device=device)]
    traced = trace(step, [*params, *batch])
    apply_passes(traced.graph)
    traced.recompile()
    assert [(new.shape, new.device.type) for new in traced(*params, *batch)] == [(p.shape, device) for p in params]
    devices = {n.kwargs["device"].type for n in traced.graph.nodes if "device" in n.kwargs}
    assert devices == {device}
