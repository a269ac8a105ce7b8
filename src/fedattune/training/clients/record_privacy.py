"""Differential privacy of single training rows: the noise of every client's gradients, and the epsilon it has spent.

DP-SGD (Abadi et al., CCS 2016) inside the `Grad` that every client rule gets its gradients from.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, log, sqrt
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError
from ...core.losses import TrainingLoss, make_loss
from ...core.network import MethodModule, Network
from ...core.params import Params
from ...core.payload import Batch, RoundContext
from ...core.settings import RecordNoiseOptions, Settings
from ...core.task import Task
from ...data import Federation
from ...data.federated import FederationInfo
from ...privacy.accounting import Sampled, check_accounting, compute_epsilon, find_multiplier, format_epsilon
from ...privacy.dp_sgd import GradientNoise, count_steps
from ...runs.context import RunContext
from ..sampling import count_cohorts
from ..setup import init_server

SIZE_RATIO = 1.05
"""Numbers of rows are rounded down to powers of this for the accounting, so that few of them must be calibrated."""

EXAMPLE_CLIENTS = 2
"""Clients of the server with which gradient calls are counted."""


def check_record_privacy(
    algorithm: Algorithm, module: nn.Module, settings: Settings, federation: Federation | FederationInfo
) -> None:
    """Check that every number that training takes from a row is a gradient that can be made private."""
    if settings.privacy.record is None:
        return
    check_accounting()
    loss = make_loss(settings.loss, federation.classes, federation.kind, federation.output_shape)
    reason = _find_obstacle(algorithm, module, loss)
    if isinstance(federation, Federation):  # a server has no rows; each node checks with its own
        reason = reason or _find_gradient_error(module, loss, federation, settings.execution.dtype)
    if settings.training.max_grad_norm is not None:
        reason = "every row's gradient is clipped to dp_record_clip already; leave max_grad_norm out"
    if reason:
        raise ConfigError(f"record-level differential privacy (--dp-record) cannot go with this: {reason}")


def _find_obstacle(algorithm: Algorithm, module: nn.Module, loss: TrainingLoss) -> str | None:
    task = Task(module)
    if isinstance(module, MethodModule) and module.has_batch_loss:
        return (
            "the method compares the rows of a batch, or adds up their features, so that no row has a gradient of its "
            "own; choose a method without such a loss, such as fedper or ditto"
        )
    if task.has_batch_statistics:
        return (
            "BatchNorm layers mix the rows of a batch and keep their statistics without noise; use a model with "
            "GroupNorm layers (nn.GroupNorm) instead"
        )
    network = algorithm.network
    if network is not None and type(network).client_buffers is not Network.client_buffers:
        return (
            "the method reads the exact number of rows of each class of a client, which has no noise; choose a "
            "method without class counts, such as fedper or ditto"
        )
    if loss.is_balanced:
        return (
            "balanced class weights follow from the exact number of rows of each class of a client, which has no "
            "noise; give the weights as numbers, such as --class-weights 1,3"
        )
    if algorithm.client.plan.probe is not None:
        return (
            "the method reads rows before its local steps (it scores models on them, or passes over them with "
            "gradients of its own), which the accounting does not cover; choose a method that only takes local steps, "
            "such as fedmcsa or ditto"
        )
    if algorithm.fine_tune and algorithm.fine_tune.part == "test":
        return "the method fits the model to test rows, which have no protection; let it adapt on train"
    return None


def _find_gradient_error(module: nn.Module, loss: TrainingLoss, federation: Federation, dtype: str) -> str | None:
    kind = getattr(torch, dtype)
    task = Task(copy.deepcopy(module), loss=loss).to(torch.device("cpu"), kind)
    samples = next((rows for rows in federation.part("train") if len(rows)), None)
    if samples is None:  # a node without training rows
        return None
    index = torch.as_tensor(samples[:2], device=federation.device)
    x, y = federation.features(index, kind).cpu(), federation.y[index].cpu()
    reason = task.find_gradient_error((x, y), clip=1.0)
    if reason is None:
        return None
    return (
        f"the model {type(module).__name__} gives no gradients of single rows ({reason}); use layers, and a loss, that "
        "torch.func.vmap supports"
    )


def count_gradients(context: RunContext) -> tuple[int, ...]:
    """Count the gradients that one local step takes on each of its batches, from a step without data.

    The count is the same for all clients, steps and rounds: a rule cannot branch on values of tensors.
    """
    rule, task, settings = context.algorithm.client, context.task, context.settings
    n = min(context.n_clients, EXAMPLE_CLIENTS)
    server = init_server(context.algorithm, task, n, settings.seed)
    payload = context.algorithm.server.broadcast(server, context.all_ids[:1]).payload.rows(0)
    sent = payload._replace(params=Params({**task.params, **payload.params}))
    one = next(iter(task.params.values())).new_ones(())
    yes = torch.ones((), dtype=torch.bool, device=one.device)
    names = tuple(context.algorithm.personal.names(task.model))
    round_context = RoundContext(settings.training.lr, one, one, n, names, yes)
    calls = [0] * rule.plan.batches_per_step

    def count(w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:  # noqa: ARG001 (as `Grad` has it)
        calls[round(float(batch[1].reshape(-1)[0]))] += 1
        return w.zeros()

    numbers = torch.arange(len(calls), dtype=one.dtype, device=one.device)[:, None]  # the labels number the batches
    batch: Batch = (one.new_zeros(len(calls), 1, *context.federation.input_shape), numbers, one.new_ones(len(calls), 1))
    if len(calls) == 1:
        batch = tuple(t[0] for t in batch)
    with torch.no_grad():
        carry = rule.begin(sent, rule.init_local_state(task.params), yes, round_context)
        rule.step(carry, batch, count, round_context)
    return tuple(calls)


@dataclass(frozen=True)
class RecordPlan:
    """The noise of every client, and the epsilon that it spends.

    Rows of one client are its neighbours: one row more or less. The number of rows of each client is public.
    `is_secret` says that this is a node, whose random numbers nobody else knows.
    """

    context: RunContext
    noise: RecordNoiseOptions
    is_secret: bool = False

    @classmethod
    def make(cls, context: RunContext, *, is_secret: bool = False) -> "RecordPlan | None":
        noise = context.settings.privacy.record
        return None if noise is None else cls(context, noise, is_secret)

    @cached_property
    def calls(self) -> tuple[int, ...]:
        """Gradients of a local step on each of its batches."""
        return count_gradients(self.context)

    def training(self) -> GradientNoise:
        return GradientNoise(self.noise.clip, self.calls, self.multiplier, self.is_secret)

    def fine_tuning(self) -> GradientNoise:
        """Return the privacy of fine-tuning, which is plain SGD."""
        return replace(self.training(), calls=(1,))

    def multiplier(self, client: int) -> float:
        """Return the noise multiplier of a client: noise over the clipping norm, on the sum of a batch."""
        if self.noise.epsilon is None:
            return self.noise.noise or 0.0
        n = int(self.context.n_train[client])
        rounds = int(self.planned_rounds[client])
        if not n or not rounds + self.planned_evaluations:
            return 0.0
        return find_multiplier(
            self.noise.epsilon,
            self.context.settings.privacy.delta,
            self._mechanisms(n, rounds, self.planned_evaluations),
        )

    def epsilon(self, client: int, rounds: int, evaluations: int) -> float:
        n = int(self.context.n_train[client])
        if not n:
            return 0.0
        noise = self.multiplier(client)
        parts = self._mechanisms(n, rounds, evaluations)
        return compute_epsilon(self.context.settings.privacy.delta, noise, parts)

    @property
    def planned_evaluations(self) -> int:
        """Evaluations for which models are fine-tuned, one on arrival included; 0 if the method does not fine-tune."""
        settings = self.context.settings
        return 1 + ceil(settings.rounds / settings.eval_every) if self.context.algorithm.fine_tune else 0

    def _mechanisms(self, n: int, rounds: int, evaluations: int) -> tuple[Sampled, ...]:
        # k gradients of one batch are one Gaussian mechanism with the noise over sqrt(k), on one Poisson sample.
        training, plan = self.context.settings.training, self.context.algorithm.client.plan
        rows = max(1, min(n, ceil(SIZE_RATIO ** int(log(n) / log(SIZE_RATIO) + 1e-9))))
        rate = min(1.0, training.batch_size / rows)
        steps = count_steps(
            training.local_steps, training.epochs, n, training.batch_size, plan.batches_per_step, plan.passes
        )
        parts = [Sampled(1 / sqrt(k), rate, rounds * steps) for k in self.calls if k and rounds]
        if (tuned := self.context.algorithm.fine_tune) and evaluations:
            ft_steps = tuned.steps or count_steps(training.local_steps, training.epochs, n, training.batch_size)
            parts.append(Sampled(1.0, rate, evaluations * ft_steps))
        merged: dict[float, int] = {}
        for part in parts:
            merged[part.multiplier] = merged.get(part.multiplier, 0) + part.times
        return tuple(Sampled(multiplier, rate, count) for multiplier, count in sorted(merged.items()))

    @cached_property
    def planned_rounds(self) -> NDArray[np.int64]:
        """Rounds (N,) in which each client trains; the seed draws the cohorts.

        On a real node all rounds count: clients may join, and other cohorts are drawn then.
        """
        context, settings = self.context, self.context.settings
        if context.algorithm.participation.train == "all" or self.is_secret:
            return np.full(context.n_clients, settings.rounds, dtype=np.int64)
        return count_cohorts(settings, context.n_clients, settings.rounds)


class RecordLedger:
    """The privacy that clients have spent so far; without record-level privacy, it counts nothing.

    `rounds` (N,) counts those in which each client trained, `evaluations` those for which models were fine-tuned.
    """

    def __init__(self, context: RunContext, *, is_secret: bool = False) -> None:
        self.plan = RecordPlan.make(context, is_secret=is_secret)
        self.rounds = torch.zeros(context.n_clients if self.plan else 0, dtype=torch.int64)
        self.evaluations = torch.zeros((), dtype=torch.int64)

    def add_round(self, ids: Tensor, dropouts: Tensor) -> None:
        """Count a round in which clients `ids` trained, except the ones that dropped out before."""
        if self.plan:
            self.rounds[ids[~torch.isin(ids, dropouts)].cpu()] += 1

    def add_evaluation(self) -> None:
        self.evaluations += 1

    def state_tree(self) -> dict[str, Any]:
        return {"privacy": {"rounds": self.rounds, "evaluations": self.evaluations}} if self.plan else {}

    def load(self, flat: Mapping[str, Tensor]) -> None:
        if self.plan:
            before = flat["privacy/rounds"]
            self.rounds[: len(before)] = before
            self.evaluations = flat["privacy/evaluations"].clone()

    def facts(self, repeats: int = 0) -> dict[str, Any]:
        """Return the facts about the privacy of the run, with one number per evaluated client."""
        if not self.plan:
            return {}
        plan, ids = self.plan, self.plan.context.eval_ids.tolist()
        spent = self._spent(ids, repeats)
        return {
            "record_privacy": {
                "level": "record",
                "mechanism": "DP-SGD: Gaussian noise on sums of clipped gradients of single rows",
                "neighbours": "one training row of a client added or removed",
                "epsilon": [None if one == inf else one for one in spent],
                "largest": None if (worst := self._find_largest(repeats)) == inf else worst,
                "target": plan.noise.epsilon,
                "delta": plan.context.settings.privacy.delta,
                "noise_multiplier": [self.plan.multiplier(i) for i in ids],
                "clip": plan.noise.clip,
                "sampling": "Poisson",
                "gradients_per_batch": list(self.plan.calls),
                "repeated_rounds": repeats,
                "generator": "the operating system" if self.plan.is_secret else "the seed of this simulation",
            }
        }

    def notes(self, repeats: int = 0) -> list[str]:
        if not self.plan:
            return []
        context = self.plan.context
        delta, spent = context.settings.privacy.delta, self._spent(context.eval_ids.tolist(), repeats)
        noise = sorted(self.plan.multiplier(i) for i in context.eval_ids.tolist())
        found = [
            f"record-level differential privacy: epsilon {format_epsilon(median(spent))} in the median of clients, "
            f"at most {format_epsilon(self._find_largest(repeats))}, at delta {delta:g}, for one training row more or "
            f"less (noise multiplier {noise[0]:.3g} to {noise[-1]:.3g}, gradients clipped to {self.plan.noise.clip:g})"
            "; validation and test rows, and the sizes of clients, are not protected"
        ]
        largest = int(context.n_train.max())
        if delta * largest >= 1:
            found.append(
                f"delta {delta:g} is no promise for a client with {largest:,} training rows: choose one "
                f"well below {1 / largest:.1g} (--dp-delta)"
            )
        return found

    def _find_largest(self, repeats: int) -> float:
        """Return the largest epsilon of all clients, also of those that are not evaluated."""
        assert self.plan is not None
        alike: dict[tuple[int, int], int] = {}  # rows and planned rounds, and so noise -> who trained most
        keys = zip(self.plan.context.n_train.tolist(), self.plan.planned_rounds.tolist(), strict=True)
        for i, key in enumerate(keys):
            if key not in alike or self.rounds[alike[key]] < self.rounds[i]:
                alike[key] = i
        return max(self._spent(list(alike.values()), repeats))

    def _spent(self, ids: Sequence[int], repeats: int) -> list[float]:
        assert self.plan is not None
        evaluations = int(self.evaluations) + repeats
        return [self.plan.epsilon(i, int(self.rounds[i]) + repeats, evaluations) for i in ids]
