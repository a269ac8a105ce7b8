"""Optimizers of local training as pure functions, with the names and defaults of `torch.optim`, and schedules of rates.

Refused: `torch.optim` itself. It changes modules in place, so it can train neither many clients as one batch of models
nor inside recorded steps.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from .params import Params
from .payload import LocalState
from .settings import ScheduleKind

PREFIX = "optimizer_"
"""Beginning of the names of an optimizer's state in the local state of a client, where it is kept between rounds."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """Turns gradients into steps of one model: pure functions, written for one client without a client axis.

    The methods share their arguments:

        w: the model
        g: its gradient, with corrections and coupled weight decay
        state: the optimizer's state, by name, such as the moments of Adam
        lr: learning rate, a number or a scalar tensor

    Attributes:
        keeps_state: whether the state stays on the client between rounds; else it restarts in every round.
    """

    keeps_state: bool = False

    @abstractmethod
    def init(self, w: Params) -> LocalState:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, w: Params, g: Params, state: LocalState, lr: Tensor | float) -> tuple[Params, LocalState]:
        """Return the model and the state after a step."""

    def init_local_state(self, w0: Params) -> LocalState:
        """Return the part of a client's first state that the optimizer keeps between rounds."""
        return self.keep(self.init(w0))

    def begin(self, w: Params, local_state: LocalState) -> LocalState:
        """Return the state before the first step of a round."""
        state = self.init(w)
        return {name: local_state[PREFIX + name] for name in state} if self.keeps_state else state

    def keep(self, state: LocalState) -> LocalState:
        """Return what stays in the client's local state after a round."""
        return {PREFIX + name: value for name, value in state.items()} if self.keeps_state else {}

    def restart(self) -> Self:
        """Return the same optimizer, which restarts in every round."""
        return replace(self, keeps_state=False)


@dataclass(frozen=True)
class GradientDescent(Optimizer):
    """SGD as `torch.optim.SGD`: v <- momentum v + g, and w <- w - lr v; with Nesterov, w <- w - lr (g + momentum v)."""

    momentum: float = 0.0
    nesterov: bool = False

    def init(self, w: Params) -> LocalState:
        return {"velocity": w.zeros()} if self.momentum else {}

    def step(self, w: Params, g: Params, state: LocalState, lr: Tensor | float) -> tuple[Params, LocalState]:
        if not self.momentum:
            return w - lr * g, {}
        v = self.momentum * state["velocity"] + g
        return w - lr * (g + self.momentum * v if self.nesterov else v), {"velocity": v}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam as `torch.optim.Adam`, and with `weight_decay` as `torch.optim.AdamW`.

        m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,  t <- t + 1
        w <- w - lr weight_decay w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    Sources: Kingma and Ba (ICLR 2015), Algorithm 1; Loshchilov and Hutter (ICLR 2019), Algorithm 2.

    Attributes:
        weight_decay: coefficient of the decoupled weight decay.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, w: Params) -> LocalState:
        first = next(iter(w.values()))
        return {"m": w.zeros(), "v": w.zeros(), "steps": Params(t=torch.zeros_like(first.flatten()[0]))}

    def step(self, w: Params, g: Params, state: LocalState, lr: Tensor | float) -> tuple[Params, LocalState]:
        beta1, beta2 = self.beta1, self.beta2
        t = state["steps"]["t"] + 1
        m = state["m"] + (1 - beta1) * (g - state["m"])
        v = beta2 * state["v"] + (1 - beta2) * (g * g)
        scale = (-torch.expm1(math.log(beta2) * t)).sqrt() if beta2 else torch.ones_like(t)
        rate = lr / -torch.expm1(math.log(beta1) * t) if beta1 else lr * torch.ones_like(t)
        if self.weight_decay:
            w = w - (lr * self.weight_decay) * w
        moved = w.map(lambda a, b, c: a - rate * b / (c.sqrt() / scale + self.eps), m, v)
        return moved, {"m": m, "v": v, "steps": Params(t=t)}


PLAIN = GradientDescent()
"""SGD without momentum: w <- w - lr g."""


@dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate in each of so many `rounds`.

    In the first `warmup` rounds it rises linearly, to 1 in the last of them. Then it falls: `cosine` as
    `CosineAnnealingLR`, or `step` as `StepLR`, times `gamma` after every `step_size` rounds.
    """

    kind: ScheduleKind
    rounds: int
    warmup: int = 0
    step_size: int = 1
    gamma: float = 0.1

    def factor(self, round_: Tensor) -> Tensor:
        """Return the factor in round `round_`, counted from 1, a scalar tensor."""
        past = (round_ - 1 - self.warmup).clamp_min(0)
        if self.kind == "cosine":
            fall = 0.5 * (1 + torch.cos(math.pi * past / max(1, self.rounds - self.warmup)))
        elif self.kind == "step":
            fall = torch.exp(math.log(self.gamma) * torch.floor(past / self.step_size))
        else:
            fall = torch.ones_like(past)
        return fall * (round_ / self.warmup).clamp_max(1.0) if self.warmup else fall
