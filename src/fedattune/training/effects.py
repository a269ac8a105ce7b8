"""Measure at the end of a run how much the mechanisms of the method did."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from ..client import ClientWrapper
from ..core.algorithm import ClientUpdate, Finished
from ..core.effect import Effect, Mechanism
from ..core.network import MethodModule
from ..core.params import Params
from ..core.payload import Batch, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext
from ..engine.base import ClientInputs, Engine
from ..engine.batches import LocalTraining
from ..runs.store import MixingLog

MEASURED_CLIENTS = 8
"""Clients that are measured: they train one more round, which changes nothing."""

MEASURED_SAMPLES = 256
"""Training samples of a client on which a module is measured."""


class _Carry(NamedTuple):
    inner: Any
    changes: tuple[Tensor, ...]
    norms: tuple[Tensor, ...]


@dataclass(frozen=True)
class MeasuredUpdate(ClientWrapper):
    """A client rule that trains as `inner` does, and uploads the effect of each of its mechanisms.

    It is for training alone: its upload holds no model.
    """

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        zeros = tuple(torch.zeros_like(context.n_steps) for _ in self.mechanisms)
        return _Carry(self.inner.begin(sent, local_state, fresh, context), zeros, zeros)

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        return carry._replace(inner=super().probe(carry.inner, batch, grad, loss, context))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        measured = self.measure_step(carry.inner, batch, grad, context)
        changes = tuple(a + b for a, (b, _) in zip(carry.changes, measured, strict=True))
        norms = tuple(a + b for a, (_, b) in zip(carry.norms, measured, strict=True))
        return _Carry(self.inner.step(carry.inner, batch, grad, context), changes, norms)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        ratios = [
            (change / norm.clamp_min(1e-30)).sqrt() for change, norm in zip(carry.changes, carry.norms, strict=True)
        ]
        return Payload(Params(effects=torch.stack(ratios))), {}


def measure_training(
    rule: ClientUpdate, engine: Engine, ids: Tensor, inputs: ClientInputs, training: LocalTraining
) -> list[list[Effect]]:
    """Measure the mechanisms of a client rule in one round of local training, whose outcome is dropped."""
    measured = MeasuredUpdate(rule)
    values = engine.train(measured, ids, inputs, training).upload.params["effects"].double()
    return [
        [Effect(mechanism, value) for mechanism, value in zip(measured.mechanisms, row, strict=True)]
        for row in values.tolist()
    ]


def measure_module(module: MethodModule, state: dict[str, Tensor], x: Tensor) -> tuple[Effect, ...]:
    """Measure a method's module with the parameters and buffers `state` of one client, on its inputs x (B, ...)."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            effects: tuple[Effect, ...] = functional_call(
                _Measure(module), {f"module.{k}": v for k, v in state.items()}, (x,)
            )
    finally:
        module.train(was_training)
    return effects


class _Measure(torch.nn.Module):
    """Call `measure_effects` of a module, so that `functional_call` can give it other parameters."""

    def __init__(self, module: MethodModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Effect, ...]:
        return self.module.measure_effects(x)


def choose_measured(ids: Tensor) -> Tensor:
    """Choose evenly spread clients to measure, of clients `ids`."""
    n = min(MEASURED_CLIENTS, len(ids))
    return ids[torch.linspace(0, len(ids) - 1, n).round().long().to(ids.device)]


def average_effects(measured: Sequence[Sequence[Effect]]) -> list[Effect]:
    """Average the effects of several clients, by mechanism; values that are not finite tell nothing."""
    values: dict[Mechanism, list[float]] = {}
    for effect in (effect for effects in measured for effect in effects):
        if isfinite(effect.value):
            values.setdefault(effect.mechanism, []).append(effect.value)
    return [Effect(mechanism, sum(each) / len(each)) for mechanism, each in values.items()]


def read_last_mixing(log: MixingLog) -> MixingMatrices | None:
    """Read the mixing matrices of the last round that has any; None if no round has."""
    rounds = list(log)
    if not rounds:
        return None
    rows, columns, weights = log.among(rounds[-1])
    matrices = {component: torch.from_numpy(matrix.copy()) for component, matrix in weights.items()}
    return MixingMatrices(torch.tensor(rows), torch.tensor(columns), matrices)
