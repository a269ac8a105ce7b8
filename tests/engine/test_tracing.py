"""Functions of tensors as graphs: all operations, nothing of the values."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedattune import Params
from fedattune.core.gradient import differentiate
from fedattune.engine.compiler.tracing import trace

aten = torch.ops.aten


def test_a_gradient_under_vmap_becomes_plain_operations() -> None:
    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        def one(w: Tensor, x: Tensor) -> Tensor:
            g, _ = differentiate(
                lambda p, _, batch: ((batch[0] @ p["w"]).square().mean(), _), Params({"w": w}), Params(), (x, x)
            )
            return w - 0.5 * g["w"]

        return [vmap(one)(w, x)]

    graph = trace(step, [torch.zeros(2, 3), torch.zeros(2, 5, 3)])
    w, x = torch.randn(2, 3), torch.randn(2, 5, 3)
    want = w - 0.5 * torch.einsum("cbi,cb->ci", x, torch.einsum("cbi,ci->cb", x, w)) * 2 / 5
    torch.testing.assert_close(graph(w, x)[0], want)


@pytest.mark.parametrize("read", [lambda t: t * t.sum().item(), lambda t: t[t > 0], lambda t: t.nonzero()])
def test_a_function_that_reads_values_is_refused(read: object) -> None:
    with pytest.raises(TypeError, match="reads values of a tensor"):
        trace(lambda t: [read(t)], [torch.ones(3)])  # type: ignore[operator]


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: torch.neg(t, out=t), lambda t: t[:1].zero_()])
def test_no_argument_is_written_over(write: object) -> None:
    given = torch.ones(3)
    with pytest.raises(TypeError, match="writes over an argument"):
        trace(lambda t: [write(t)], [given])  # type: ignore[operator]
    assert given.tolist() == [1, 1, 1]
