"""Losses of samples, and gradients of the mean loss."""

import torch
from torch import Tensor, nn

from fedattune.core.params import Params
from fedattune.core.task import Task, compute_sample_losses


class Partly(nn.Module):
    """A network with statistics, and a layer that takes part in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Constant(nn.Module):
    """A network whose output does not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * 2


def assert_same(got: Params, want: Params) -> None:
    assert got.keys() == want.keys()
    for k in want:
        assert not got[k].requires_grad
        torch.testing.assert_close(got[k], want[k], rtol=1e-12, atol=1e-14)


def test_losses_are_cross_entropy() -> None:
    logits, y = 40 * torch.randn(50, 7).double(), torch.randint(0, 7, (50,))
    expected = nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(compute_sample_losses(logits, y), expected, rtol=1e-12, atol=1e-12)


def test_plain_autograd_gives_the_gradient_of_the_function_transform() -> None:
    batch = (torch.randn(6, 5).double(), torch.randint(0, 3, (6,)))
    for model in (Partly(), Constant()):
        task = Task(model.double())
        before = task.params.map(torch.clone)
        with torch.no_grad():
            g, buffers = task.eager_gradient(task.params, task.buffers, batch)
            want, want_buffers = task.gradient(task.params, task.buffers, batch)
        assert_same(g, want)
        assert_same(buffers, want_buffers)
        assert_same(task.params, before)
    assert all((v == 0).all() for v in g.values())  # the last network's


def test_plain_autograd_works_inside_transforms() -> None:
    batch = (torch.randn(6, 5).double(), torch.randint(0, 3, (6,)))
    task = Task(Partly().double())
    directions = task.params.map(torch.ones_like)

    def first(w: Params) -> Tensor:
        g, _ = task.eager_gradient(w, task.buffers, batch)
        return sum((v * directions[k]).sum() for k, v in g.items())  # type: ignore[return-value]

    product = torch.func.grad(first)(task.params)  # the Hessian times ones
    assert any((v != 0).any() for v in product.values())
