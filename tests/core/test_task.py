"""Losses of samples, and gradients of the mean loss."""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedattune.core.params import Params
from fedattune.core.task import ModelTraits, Task


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


def test_both_gradients_are_the_gradient_of_the_function_transform() -> None:
    batch = (torch.randn(6, 5).double(), torch.randint(0, 3, (6,)))
    for model in (Partly(), Constant()):
        task = Task(model.double())
        before = task.params.map(torch.clone)
        with torch.no_grad():
            g, buffers = task.eager_gradient(task.params, task.buffers, batch)
            own, own_buffers = task.gradient(task.params, task.buffers, batch)
        want, want_buffers = torch.func.grad(task._loss, has_aux=True)(task.params, task.buffers, batch)
        assert_same(g, want)
        assert_same(own, want)
        assert_same(buffers, want_buffers)
        assert_same(own_buffers, want_buffers)
        assert_same(task.params, before)
    assert all((v == 0).all() for v in g.values())  # the last network's


@pytest.mark.parametrize("name", ["gradient", "eager_gradient"])
def test_gradients_work_inside_transforms(name: str) -> None:
    """The Hessian times ones is the change of the gradient; a batch with a batch axis gives each batch's gradient."""
    x, y = torch.randn(2, 6, 5).double(), torch.randint(0, 3, (2, 6))
    task = Task(Partly().double())

    def first(w: Params) -> Params:
        return getattr(task, name)(w, task.buffers, (x[0], y[0]))[0]

    def total(w: Params) -> Tensor:
        return torch.stack([v.sum() for v in first(w).values()]).sum()

    product, step = torch.func.grad(total)(task.params), 1e-6
    ahead, behind = (first(task.params.map(lambda v, s=s: v + s * step)) for s in (1, -1))
    for k, v in product.items():
        torch.testing.assert_close(v, (ahead[k] - behind[k]) / (2 * step), rtol=1e-5, atol=1e-7)

    task = Task(nn.Linear(5, 3).double())
    each = torch.func.vmap(lambda *batch: getattr(task, name)(task.params, task.buffers, batch)[0])(x, y)
    for i in range(2):
        assert_same(each.rows(i), task.eager_gradient(task.params, task.buffers, (x[i], y[i]))[0])


def test_single_numbers_among_the_parameters_are_clipped_with_the_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    task, batch = Task(Scaled().double()), (torch.randn(4, 5).double(), torch.arange(4) % 3)
    assert task.find_gradient_error(batch, clip=1.0) is None
    g = task.clipped_gradient(task.params, task.buffers, (*batch, torch.ones(4).double()), 1e9)
    assert_same(g, 4.0 * task.gradient(task.params, task.buffers, batch)[0])


def test_dropout_in_packed_sequences_is_no_look_at_other_rows() -> None:
    """How many numbers it draws depends on the lengths of all rows of the batch."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(1, 4, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            lengths = (x != 0).sum(1).clamp_min(1).cpu()
            packed = pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
            out: Tensor = self.head(self.lstm(packed)[1][0][-1])
            return out

    task = Task(Packed())
    task.inspect(torch.tensor([[1.0, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0], [4, 3, 2, 0]]))
    assert task.traits == ModelTraits()
    assert not task.has_batch_statistics


def test_traits_are_found_without_a_trace() -> None:
    """Random numbers and counters stay where they were, and noise is not taken for a look at other rows."""

    class Noisy(nn.Module):
        def __init__(self, noise: Callable[[], float]) -> None:
            super().__init__()
            self.layer, self.drop, self.calls, self.noise = nn.Linear(5, 3), nn.Dropout(0.5), 0, noise

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.drop(self.layer(x)) * (1.0 + self.noise() + self.calls)

    for noise in (random.random, np.random.random, time.perf_counter):
        task = Task(Noisy(noise))
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        task.inspect(torch.arange(20.0).view(4, 5))
        assert task.traits == ModelTraits()
        assert task.model.calls == 0
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
