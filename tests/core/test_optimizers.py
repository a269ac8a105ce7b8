"""Optimizers against `torch.optim`, and schedules against `torch.optim.lr_scheduler`."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from fedattune.core.optimizers import Adam, GradientDescent, Optimizer, Schedule
from fedattune.core.params import Params

STEPS = 30


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("optimizer", "decay", "reference", "options"),
    [
        (GradientDescent(), 0.0, torch.optim.SGD, {}),
        (GradientDescent(), 0.1, torch.optim.SGD, {"weight_decay": 0.1}),
        (GradientDescent(momentum=0.9), 0.0, torch.optim.SGD, {"momentum": 0.9}),
        (GradientDescent(momentum=0.8, nesterov=True), 0.0, torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
        (Adam(), 0.0, torch.optim.Adam, {}),
        (Adam(beta1=0.5, beta2=0.9, eps=1e-3), 0.0, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
        (Adam(beta1=0.0, beta2=0.0), 0.0, torch.optim.Adam, {"betas": (0.0, 0.0)}),
        (Adam(), 0.1, torch.optim.Adam, {"weight_decay": 0.1}),
        (Adam(weight_decay=0.01), 0.0, torch.optim.AdamW, {}),
        (Adam(weight_decay=0.3), 0.0, torch.optim.AdamW, {"weight_decay": 0.3}),
    ],
    ids=str,
)
def test_steps_are_those_of_torch(optimizer: Optimizer, decay: float, reference: Any, options: dict[str, Any]) -> None:
    """Coupled weight decay is in the gradient already, as the engine puts it there."""
    start = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    theirs = start.clone().requires_grad_()
    torch_optimizer = reference([theirs], lr=0.05, **options)
    w = Params(a=start)
    state = optimizer.begin(w, {})
    for g in gradients((2, 3)):
        theirs.grad = g.clone()
        torch_optimizer.step()
        w, state = optimizer.step(w, Params(a=g) + decay * w, state, 0.05)
        torch.testing.assert_close(w["a"], theirs.detach(), rtol=1e-12, atol=1e-12)


def test_the_first_steps_of_adam_are_exact_in_float32() -> None:
    """1 - beta2^t is small there, and would lose digits as a difference."""
    theirs = torch.ones(3, requires_grad=True)
    reference = torch.optim.Adam([theirs], lr=1.0, betas=(0.9, 0.9999))
    w, optimizer = Params(a=torch.ones(3)), Adam(beta2=0.9999)
    state = optimizer.begin(w, {})
    for g in gradients((3,)):
        theirs.grad = g.float()
        reference.step()
        w, state = optimizer.step(w, Params(a=g.float()), state, 1.0)
    torch.testing.assert_close(w["a"], theirs.detach(), rtol=1e-6, atol=1e-6)


def test_a_state_restarts_or_stays() -> None:
    w, g = Params(a=torch.ones(2)), Params(a=torch.ones(2))
    for optimizer in (GradientDescent(momentum=0.5), Adam()):
        assert optimizer.init_local_state(w) == {} == optimizer.keep(optimizer.init(w))
    kept = GradientDescent(keeps_state=True, momentum=0.5)
    local = kept.init_local_state(w)
    assert local["optimizer_velocity"]["a"].tolist() == [0, 0]
    for velocity in (1.0, 1.5, 1.75):
        _, state = kept.step(w, g, kept.begin(w, local), 0.1)
        local = kept.keep(state)
        assert local["optimizer_velocity"]["a"].tolist() == [velocity, velocity]
    assert kept.restart().begin(w, local)["velocity"]["a"].tolist() == [0, 0]


def factors(schedule: Schedule, rounds: int) -> list[float]:
    return [float(schedule.factor(torch.tensor(float(r), dtype=torch.float64))) for r in range(1, rounds + 1)]


def test_schedules_are_those_of_torch() -> None:
    weight = torch.zeros(1, requires_grad=True)
    for schedule, make in (
        (Schedule("cosine", 12), lambda one: CosineAnnealingLR(one, 12)),
        (Schedule("step", 12, step_size=5, gamma=0.2), lambda one: StepLR(one, 5, 0.2)),
    ):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        theirs, want = make(optimizer), []
        for _ in range(12):
            want.append(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()
        assert factors(schedule, 12) == pytest.approx(want, abs=1e-12)


def test_a_warm_up_rises_and_hands_over() -> None:
    assert factors(Schedule("constant", 6, warmup=4), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    after = factors(Schedule("cosine", 10, warmup=2), 10)
    assert after[:3] == pytest.approx([0.5, 1, 1])
    assert after[2:] == pytest.approx(factors(Schedule("cosine", 8), 8))
    assert factors(Schedule("step", 5, warmup=1, step_size=2), 5) == pytest.approx([1, 1, 1, 0.1, 0.1])
