"""Choose the samples of every local step: a pure function of seed, stream, round and client."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import ClientUpdate, Probing
from ..core.optimizers import Schedule
from ..core.payload import LocalState, RoundContext
from ..core.settings import Augmentation
from ..core.streams import Stream
from ..data.augmentation import add_moves
from ..data.types import Index
from ..privacy.dp_sgd import ClientNoise, GradientNoise, count_steps, draw_poisson_batches, make_generator

PROBED_AT_ONCE = 128
"""Validation rows of a batch that is probed, if training batches are smaller."""


@dataclass(frozen=True)
class LocalTraining:
    """Local training of one round, the same for every client.

    Attributes:
        seed, stream, round: key the batches, together with the client's number. So a result depends neither on the
            engine, nor on the order of clients, nor on the other clients of the round.
        steps, epochs: local steps, or passes over the client's data; one of the two is None.
        schedule: factor of `lr` by the round; None for a constant rate.
        max_grad_norm: norm to which the gradient of a mini-batch is clipped; None for no limit.
        drop_last: leave out the incomplete last batch of an epoch (for models that normalize over the batch).
        cohort_size, personal_names: see `RoundContext`.
        augment: random changes of the images in batches; probed rows stay as they are.
        privacy: makes gradients private, of batches that are Poisson samples; None for plain gradients.
    """

    seed: int
    stream: int
    round: int
    lr: float
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    weight_decay: float = 0.0
    schedule: Schedule | None = None
    max_grad_norm: float | None = None
    part: Literal["train", "validation", "test"] = "train"
    drop_last: bool = False
    cohort_size: int = 0
    personal_names: tuple[str, ...] = ()
    augment: tuple[Augmentation, ...] = ()
    privacy: GradientNoise | None = None

    def rng_seed(self, client: int = 0) -> int:
        return int(np.random.SeedSequence([self.seed, self.stream, self.round, client]).generate_state(1)[0])

    def make_round_context(self, n_steps: Tensor, is_uploaded: Tensor, round_: Tensor) -> RoundContext:
        context = RoundContext(self.lr, n_steps, round_, self.cohort_size, self.personal_names, is_uploaded)
        if self.schedule is None:
            return context
        factor, before = self.schedule.factor(round_), self.schedule.factor((round_ - 1).clamp_min(1))
        return context._replace(lr=self.lr * factor, lr_change=factor / before)

    def round_tensor(self, like: Tensor) -> Tensor:
        """Return the round's number as a scalar tensor, so that one compiled step serves all rounds."""
        return torch.tensor(float(self.round), dtype=like.dtype, device=like.device)

    def compiler_key(self, rule: ClientUpdate) -> tuple[Hashable, ...]:
        privacy = self.privacy and (self.privacy.clip, self.privacy.calls)
        rate = self.lr, self.schedule, self.weight_decay, self.max_grad_norm
        return (_hashable_rule(rule), *rate, self.cohort_size, self.personal_names, privacy)

    def make_noise(self, client: int, n: int, n_values: int) -> ClientNoise | None:
        if self.privacy is None:
            return None
        weight = 1 / max(1, min(self.batch_size, n))
        deviation = self.privacy.multiplier(client) * self.privacy.clip * weight
        key = (self.seed, self.stream, self.round, client)
        return ClientNoise(sum(self.privacy.calls), n_values, weight, deviation, key, self.privacy.is_secret)

    def choose_batches(
        self, rule: ClientUpdate, client: int, samples: Index, held_out: Index, local_state: LocalState
    ) -> tuple[Index, Index | None]:
        """Choose the batches of one client's local steps, and those that it probes before; None without a probe.

        With `augment`, sample numbers of local steps have moves; see `fedattune.data.augmentation`.
        """
        plan, probe = rule.plan, rule.plan.probe
        probed = held_out if probe and probe.rows == "validation" else samples
        min_rows = 2 if self.drop_last else 1  # a single sample has no batch statistics
        if probe and probe.rows == "held_out" and len(samples) > min_rows:
            order = np.random.default_rng([self.seed, Stream.PROBE_SPLIT, client]).permutation(samples)
            cut = max(1, min(len(samples) - min_rows, round(probe.share * len(samples))))
            probed, samples = order[:cut], order[cut:]
        repeat, more = plan.passes, self
        if repeat > 1:
            more = replace(
                self,
                steps=None if self.steps is None else self.steps * repeat,
                epochs=None if self.epochs is None else self.epochs * repeat,
            )
        batches = more.draw_batches(client, samples, plan.batches_per_step)
        if self.augment:
            key = [self.seed, Stream.AUGMENTATION + self.stream, self.round, client]
            batches = add_moves(batches, self.augment, np.random.default_rng(key))
        if probe is None or not isinstance(rule, Probing):
            return batches, None
        if probe.rows == "train" and probe.share < 1:
            rng = np.random.default_rng([self.seed, Stream.PROBE, self.round, client])
            probed = rng.permutation(probed)[: max(min_rows, round(probe.share * len(probed)))]
        probes = rule.probe_passes(local_state)
        stream = Stream.PROBE + self.stream
        # Rows that nobody trains on are read in larger batches: small ones cost more calls than work.
        size = max(self.batch_size, PROBED_AT_ONCE) if probe.rows == "validation" else self.batch_size
        pass_ = replace(self, steps=None, epochs=int(probes), stream=stream, batch_size=size)
        return batches, pass_.draw_batches(client, probed, 1) if probes else batches[:0]

    def draw_batches(self, client: int, samples: Index, per_step: int) -> Index:
        """Draw the batches of one client without replacement, reshuffled after each pass.

        With privacy, every sample comes into each batch by chance instead; see `draw_poisson_batches`.

        With `steps`, batches are full and may span two passes. With `epochs`, the last batch of a pass may be
        incomplete. A client with fewer samples than the batch size takes all of them in every batch; one without
        samples takes no step. Return sample numbers (steps, per_step, batch); -1 fills an incomplete batch.
        """
        n = len(samples)
        if not n:
            return np.empty((0, per_step, 1), dtype=np.int64)
        size = min(self.batch_size, n)
        if self.privacy is not None:
            key = (self.seed, self.stream, self.round, client, Stream.RECORD_BATCHES)
            chance = make_generator(key, is_secret=self.privacy.is_secret)
            count = count_steps(self.steps, self.epochs, n, self.batch_size, per_step)
            return draw_poisson_batches(samples, self.batch_size, count, per_step, chance)
        rng = np.random.default_rng([self.seed, self.stream, self.round, client])
        if self.steps is not None:
            total = self.steps * per_step * size
            passes = [rng.permutation(n) for _ in range(max(1, ceil(total / n)))]
            return samples[np.concatenate(passes)[:total]].reshape(self.steps, per_step, size)
        if self.epochs is None:
            raise ValueError("LocalTraining: got neither steps nor epochs, expected one of them")
        per_epoch = n // size if self.drop_last else ceil(n / size)
        rows = np.full((self.epochs, per_epoch * size), -1, dtype=np.int64)
        for row in rows:
            order = rng.permutation(n)[: per_epoch * size]
            row[: len(order)] = samples[order]
        rows = rows.reshape(-1, size)
        steps = max(1, len(rows) // per_step)
        # One step may need more batches than the epoch has: repeat them.
        return np.resize(rows, (steps * per_step, size)).reshape(steps, per_step, size)


def _hashable_rule(rule: ClientUpdate) -> Hashable:
    """Return the rule if it can be compared, so that equal rules share compiled steps; else wrap it."""
    try:
        hash(rule)
    except TypeError:
        return _IncomparableRule(rule)
    return rule


class _IncomparableRule:
    """A rule that equals only itself."""

    def __init__(self, rule: ClientUpdate) -> None:
        self._rule = rule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IncomparableRule) and other._rule is self._rule

    def __hash__(self) -> int:
        return id(self._rule)
