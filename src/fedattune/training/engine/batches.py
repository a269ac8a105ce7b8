"""Which samples a client sees in which local step: a pure function of seed, stream, round and client."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.algorithm import ClientUpdate
from ...core.payload import LocalState, RoundContext

HELD_OUT, PROBE = 101, 102
"""Streams of random numbers of their own."""


@dataclass(frozen=True)
class LocalTraining:
    """What every client does in one round.

    Attributes:
        seed, stream, round: key the batches together with the client's number, so that a result depends neither
            on the engine, nor on the order of clients, nor on who else trained.
        steps, epochs: local steps, or passes over the client's data; one of them is None.
        drop_last: leave out an epoch's last incomplete batch (for models that normalise over the batch).
        cohort, personal: see `RoundContext`.

    """

    seed: int
    stream: int
    round: int
    lr: float
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    weight_decay: float = 0.0
    part: Literal["train", "validation", "test"] = "train"
    drop_last: bool = False
    cohort: int = 0
    personal: tuple[str, ...] = ()

    def rng_seed(self, client: int = 0) -> int:
        """Seed of what modules draw by themselves (dropout) in this round."""
        return int(np.random.SeedSequence([self.seed, self.stream, self.round, client]).generate_state(1)[0])

    def make_context(self, n_steps: Tensor, is_uploaded: Tensor, round_: Tensor) -> RoundContext:
        """The order of a client that will do `n_steps` local steps, and that will be `is_uploaded` of or not."""
        return RoundContext(self.lr, n_steps, round_, self.cohort, self.personal, is_uploaded)

    def round_tensor(self, like: Tensor) -> Tensor:
        """The round's number as a scalar tensor, so that a recorded step serves in all rounds."""
        return torch.tensor(float(self.round), dtype=like.dtype, device=like.device)

    def recording_key(self, rule: ClientUpdate) -> tuple[Hashable, ...]:
        """What a local step depends on beside its tensors."""
        return _hashable_rule(rule), self.lr, self.weight_decay, self.cohort, self.personal

    def batches_of_clients(
        self,
        rule: ClientUpdate,
        clients: Sequence[int],
        samples: Sequence[NDArray[np.int64]],
        memory: LocalState,
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """`of` for several clients, whose memories are the rows of `memory`."""
        return [
            self.client_batches(rule, client, samples[client], {k: v.rows(row) for k, v in memory.items()})
            for row, client in enumerate(clients)
        ]

    def client_batches(
        self, rule: ClientUpdate, client: int, samples: NDArray[np.int64], memory: LocalState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The batches of a client's local steps, and those it probes before (None: the rule never does)."""
        probes = rule.probe_passes(memory)
        probed = samples
        least = 2 if self.drop_last else 1  # one sample has no batch statistics
        if rule.validation_share and len(samples) > least:
            order = np.random.default_rng([self.seed, HELD_OUT, client]).permutation(samples)
            cut = max(1, min(len(samples) - least, round(rule.validation_share * len(samples))))
            probed, samples = order[:cut], order[cut:]
        repeat, more = rule.passes, self
        if repeat > 1:
            more = replace(
                self,
                steps=None if self.steps is None else self.steps * repeat,
                epochs=None if self.epochs is None else self.epochs * repeat,
            )
        batches = more.draw_batches(client, samples, rule.batches_per_step)
        if probes is None:
            return batches, None
        if rule.probe_share < 1:
            rng = np.random.default_rng([self.seed, PROBE, self.round, client])
            probed = rng.permutation(probed)[: max(least, round(rule.probe_share * len(probed)))]
        stream = PROBE + self.stream
        pass_ = replace(self, steps=None, epochs=int(probes), stream=stream)
        return batches, pass_.draw_batches(client, probed, 1) if probes else batches[:0]

    def draw_batches(self, client: int, samples: NDArray[np.int64], per_step: int) -> NDArray[np.int64]:
        """Sample numbers (steps, per_step, batch) of one client; -1 fills an incomplete batch.

        Samples are drawn without replacement and reshuffled after each pass. With `steps`, batches are full and
        may span two passes; with `epochs`, the last batch of a pass may be incomplete. A client with fewer
        samples than the batch size takes all of them in every batch, and one without samples takes no step.
        """
        n = len(samples)
        if not n:
            return np.empty((0, per_step, 1), dtype=np.int64)
        size = min(self.batch_size, n)
        rng = np.random.default_rng([self.seed, self.stream, self.round, client])
        if self.steps is not None:
            needed = self.steps * per_step * size
            passes = [rng.permutation(n) for _ in range(max(1, ceil(needed / n)))]
            return samples[np.concatenate(passes)[:needed]].reshape(self.steps, per_step, size)
        if self.epochs is None:
            raise ValueError("work needs steps or epochs")
        per_epoch = n // size if self.drop_last else ceil(n / size)
        rows = np.full((self.epochs, per_epoch * size), -1, dtype=np.int64)
        for row in rows:
            order = rng.permutation(n)[: per_epoch * size]
            row[: len(order)] = samples[order]
        rows = rows.reshape(-1, size)
        steps = max(1, len(rows) // per_step)
        # Too few batches for one step of a method that needs several: go round once more.
        return np.resize(rows, (steps * per_step, size)).reshape(steps, per_step, size)


def _hashable_rule(rule: ClientUpdate) -> Hashable:
    """The rule, by which equal ones share what was recorded; itself alone where its fields cannot be compared."""
    try:
        hash(rule)
    except TypeError:
        return _IncomparableRule(rule)
    return rule


class _IncomparableRule:
    """A rule that is equal to nothing but itself."""

    def __init__(self, rule: ClientUpdate) -> None:
        self._rule = rule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IncomparableRule) and other._rule is self._rule

    def __hash__(self) -> int:
        return id(self._rule)
