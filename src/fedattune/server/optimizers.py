"""One global model, moved by an optimiser that takes the mean update of the cohort for a descent direction."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from ..core import Payload, ServerUpdate, State
from ..params import Params
from .average import Weighting, change, shares

SecondMoment = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True)
class ServerOptimizer(ServerUpdate):
    """w <- w + server_lr * direction, from D = sum_i p_i (received_i - sent_i) and the moments that are kept."""

    weighting: Weighting = "uniform"
    server_lr: float = 1.0

    @abstractmethod
    def start(self, w0: Params) -> dict[str, Params]:
        """The moments before the first round, by name."""

    @abstractmethod
    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        """Where to go, and the new moments, from the mean update D."""

    def init(self, w0: Params, n_clients: int) -> State:
        """The initial model and moments."""
        return {"w": w0, **self.start(w0)}

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The same global model for everybody."""
        return Payload(cast(Params, state["w"]).repeat(len(ids)))

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """One step of the optimiser."""
        kept = cast(dict[str, Params], state)
        mean = change(shares(n, self.weighting), sent.params, received.params)
        step, moments = self.direction(mean, {k: v for k, v in kept.items() if k != "w"})
        return {"w": kept["w"] + self.server_lr * step, **moments}


@dataclass(frozen=True)
class HeavyBall(ServerOptimizer):
    """v <- beta v + D, w <- w + server_lr v, from v = 0.

    Source: FedAvgM (Hsu et al., 2019), as IGFL (2021) prints it; some later code takes Nesterov's form.
    """

    beta: float = 0.9

    def start(self, w0: Params) -> dict[str, Params]:
        """Start with v = 0."""
        return {"v": w0.zeros()}

    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        """The velocity v."""
        v = self.beta * moments["v"] + mean
        return v, {"v": v}


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m <- beta1 m + (1 - beta1) D, w <- w + server_lr m / (sqrt(v) + tau), from m = 0, v = tau^2.

    adam     v <- beta2 v + (1 - beta2) D^2
    yogi     v <- v - (1 - beta2) D^2 sign(v - D^2)
    adagrad  v <- v + D^2
    Source: Reddi et al. (2021), Algorithm 2; there is no correction of the bias towards the start.
    """

    second: SecondMoment = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    def start(self, w0: Params) -> dict[str, Params]:
        """Start with m = 0, v = tau^2."""
        return {"m": w0.zeros(), "v": w0.map(lambda a: torch.full_like(a, self.tau**2))}

    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        """The first moment over the root of the second."""
        m = self.beta1 * moments["m"] + (1 - self.beta1) * mean
        v = moments["v"].map(self._second, mean)
        return m.map(lambda a, b: a / (b.sqrt() + self.tau), v), {"m": m, "v": v}

    def _second(self, v: Tensor, mean: Tensor) -> Tensor:
        square = mean.square()
        if self.second == "adagrad":
            return v + square
        if self.second == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square
