"""The local steps of several clients: side by side as one batch of models, or one client after the other.

Which client is trained when: clients with few steps follow one another while others still have theirs to do.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data import Federation
from .recorder import RecordedStep, copy_dense

SampleIndex = NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """Clients in lanes that run side by side; each lane trains its clients one after the other.

    Attributes:
        clients: per lane, its clients in their order.
        changes: step -> lanes in which a client has done its last step before it.
        steps: number of steps of the longest lane.

    """

    clients: list[list[int]]
    changes: dict[int, list[int]]
    steps: int

    @property
    def alike(self) -> bool:
        """Whether every lane trains one client, all with as many steps."""
        return all(len(lane) == 1 for lane in self.clients) and list(self.changes) in ([], [self.steps])


def pack_lanes(counts: Sequence[int], at_once: int = 1) -> list[Lanes]:
    """Lanes for clients with so many local steps each, divided into groups, `at_once` of them if there are enough.

    As many lanes as it takes to finish with the client that has the most steps, or more, so that all groups have as
    many; all are about as long. Clients without a step are in none.
    """
    longest, clients = max(counts), sum(n > 0 for n in counts)
    width = clients if min(counts) == longest else ceil(sum(counts) / longest)
    width = min(clients, at_once * ceil(width / at_once))
    lanes: list[list[int]] = [[] for _ in range(width)]
    loads = [(0, lane) for lane in range(width)]
    heapify(loads)
    for client in sorted(
        range(len(counts)), key=lambda i: -counts[i]
    ):  # stable: equal clients keep their order
        if not counts[client]:
            break
        load, lane = loads[0]
        lanes[lane].append(client)
        heapreplace(loads, (load + counts[client], lane))
    groups = min(at_once, width)
    cuts = [width * i // groups for i in range(groups + 1)]
    return [_build_lanes(lanes[start:stop], counts) for start, stop in pairwise(cuts)]


def _build_lanes(clients: list[list[int]], counts: Sequence[int]) -> Lanes:
    changes: dict[int, list[int]] = {}
    for number, lane in enumerate(clients):
        for done in accumulate(counts[i] for i in lane):
            changes.setdefault(done, []).append(number)
    return Lanes(clients, changes, max(changes))


def batch_indices(lanes: Lanes, batches: Sequence[SampleIndex]) -> SampleIndex:
    """Sample numbers (steps, lanes, per step, batch), -1 where there are none.

    A lane that has nothing left repeats its last step, whose result nobody takes.
    """
    per_step, size = batches[0].shape[1], max(b.shape[2] for b in batches)
    index = np.full((lanes.steps, len(lanes.clients), per_step, size), -1, dtype=np.int64)
    for number, lane in enumerate(lanes.clients):
        at = 0
        for client in lane:
            own = batches[client]
            index[at : at + len(own), number, :, : own.shape[2]] = own
            at += len(own)
        index[at:, number] = index[at - 1, number]
    return index


GATHER_BYTES = 1 << 20
"""Batches that are gathered at once: what stays in a core's own cache until it is used."""


MAX_STEPS_PER_CALL = 1 << 10
"""Steps in one call at most: a second Ctrl-C waits for its end."""


StepFactory = Callable[[Sequence[Tensor], Sequence[Tensor]], RecordedStep]
"""Makes a step ready for leaves and a batch like these."""


class BatchSequence:
    """What is trained on step by step: sample numbers (steps, ..., per step, B), -1 where there are none.

    A step of one mini-batch has no axis for them.
    """

    def __init__(self, filled: NDArray[np.int64], federation: Federation, dtype: torch.dtype) -> None:
        device = federation.y.device
        index = torch.as_tensor(filled, device=device)
        index = index.squeeze(-2) if index.shape[-2] == 1 else index
        self.padded = [bool(step.any()) for step in filled < 0]
        self._samples, self._index = federation.samples(dtype), index.clamp_min(0)
        self._labels, self._weights = federation.y[self._index], (index >= 0).to(dtype)
        self._features = partial(federation.features, dtype=dtype)
        size = index[0].numel() * math.prod(federation.input_shape) * dtype.itemsize
        self._ahead = max(1, GATHER_BYTES // size)

    def of(self, t: int) -> tuple[Tensor, ...]:
        """The batch of step t: inputs, labels, and weights if there is padding."""
        x, y = self._features(self._index[t]), self._labels[t]
        return (x, y, self._weights[t]) if self.padded[t] else (x, y)

    def run(
        self, step: RecordedStep, ready: list[Tensor], moving: list[Tensor], first: int, last: int
    ) -> list[Tensor]:
        """Take the steps `first` to `last` - 1, which all have padding or all have none."""
        weights = self._weights if self.padded[first] else None
        done: list[Tensor] = step.many(
            first, last, self._ahead, ready, moving, self._samples, self._index, self._labels, weights
        )
        return done

    def stretches(self, cuts: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
        """First and last + 1 of the steps between `cuts` that are all of one kind."""
        kinds = (t for t in range(1, len(self.padded)) if self.padded[t] != self.padded[t - 1])
        return pairwise(
            sorted({*range(0, len(self.padded), MAX_STEPS_PER_CALL), *kinds, *cuts, len(self.padded)})
        )


class BatchedRunner:
    """Some lanes with all their batches, and the leaves (carries, buffers and so on) of the clients that come first.

    `rows`: which of all clients (C, ...) are first in the lanes; a slice where each lane has one client.
    """

    def __init__(
        self,
        lanes: Lanes,
        batches: Sequence[NDArray[np.int64]],
        leaves: Sequence[Tensor],
        federation: Federation,
        dtype: torch.dtype,
    ) -> None:
        self.lanes = lanes
        first = [lane[0] for lane in lanes.clients]
        whole = lanes.alike and first == list(range(first[0], first[0] + len(first)))
        self.rows: Tensor | slice = (
            slice(first[0], first[0] + len(first))
            if whole
            else torch.tensor(first, device=federation.y.device)
        )
        self.leaves = [_select_rows(leaf, self.rows) for leaf in leaves]
        self._batches = BatchSequence(batch_indices(lanes, batches), federation, dtype)

    def prepare(self, maker: StepFactory) -> list[RecordedStep]:
        """Make the steps ready that `run` takes: one for batches with padding, one for those without."""
        padded = self._batches.padded
        self._steps = {kind: maker(self.leaves, self._batches.of(padded.index(kind))) for kind in set(padded)}
        return list(self._steps.values())

    def run(self, fixed: Sequence[Tensor], start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Do all steps from `start` (C, ...); the leaves that move are written to the clients' rows of `out`.

        `out` begins as a copy of `start`, which may be written over.
        """
        moving = sorted({i for step in self._steps.values() for i in step.moving})
        here = dict(enumerate(self.leaves))
        in_place = isinstance(self.rows, slice)
        for i in moving:
            here[i] = out[i][self.rows] if in_place else copy_dense(here[i])
        ready = self._ready(fixed, here)
        waiting = [list(lane) for lane in self.lanes.clients]
        changes = {} if in_place else self.lanes.changes
        # What a step of one kind moves, those of the other may hold ready.
        differ = len({step.moving for step in self._steps.values()}) > 1
        for first, last in self._batches.stretches(changes):
            if first in changes:
                self._change(changes[first], waiting, here, start, out, moving)
            if first in changes or differ:
                ready = self._ready(fixed, here)
            padded = self._batches.padded[first]
            step = self._steps[padded]
            new = self._batches.run(step, ready[padded], [here[i] for i in step.moving], first, last)
            here.update(zip(step.moving, new, strict=True))
        if in_place:
            for i in moving:
                if here[i].data_ptr() != out[i][self.rows].data_ptr():
                    out[i][self.rows] = here[i]
        else:
            self._change(changes[self.lanes.steps], waiting, here, start, out, moving)

    def _ready(self, fixed: Sequence[Tensor], here: dict[int, Tensor]) -> dict[bool, list[Tensor]]:
        """What the steps need of the leaves that stay, which are the same for both."""
        leaves = [here[i] for i in range(len(here))]
        return {padded: step.before(*fixed, *step.staying(leaves)) for padded, step in self._steps.items()}

    def _change(
        self,
        lanes: Sequence[int],
        waiting: list[list[int]],
        here: dict[int, Tensor],
        start: Sequence[Tensor],
        out: Sequence[Tensor],
        moving: Sequence[int],
    ) -> None:
        """Take what the clients that are done in `lanes` leave, and put in those that come next."""
        for lane in lanes:
            done = waiting[lane].pop(0)
            for i in moving:
                out[i][done] = here[i][lane]
            if waiting[lane]:
                for i, leaf in here.items():
                    if leaf.stride(0) or i in moving:  # else all clients have the same
                        leaf[lane] = start[i][waiting[lane][0]]


class SerialRunner:
    """Clients one after the other, without a client axis."""

    def __init__(
        self,
        clients: Sequence[int],
        batches: Sequence[NDArray[np.int64]],
        leaves: Sequence[Tensor],
        federation: Federation,
        dtype: torch.dtype,
    ) -> None:
        self._leaves = leaves
        self._batches = {i: BatchSequence(batches[i], federation, dtype) for i in clients}
        self._sizes = {i: batches[i].shape[2] for i in clients}

    def prepare(self, maker: StepFactory) -> list[RecordedStep]:
        """Make the steps ready that `run` takes: one for every size of batch, with padding and without."""
        self._steps: dict[tuple[int, bool], RecordedStep] = {}
        for client, batches in self._batches.items():
            for t, padded in enumerate(batches.padded):
                if (kind := (self._sizes[client], padded)) not in self._steps:
                    first = [leaf[client] for leaf in self._leaves]
                    self._steps[kind] = maker(first, batches.of(t))
        return list(self._steps.values())

    def run(self, fixed: Sequence[Tensor], start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Do all steps from `start` (C, ...); the leaves that move are written to the clients' rows of `out`."""
        for client, batches in self._batches.items():
            here = [leaf[client] for leaf in out]
            for first, last in batches.stretches():
                step = self._steps[self._sizes[client], batches.padded[first]]
                ready = step.before(*fixed, *step.staying(here))
                new = batches.run(step, ready, [here[i] for i in step.moving], first, last)
                for i, leaf in zip(step.moving, new, strict=True):
                    here[i] = leaf
            for leaf, row in zip(here, (leaf[client] for leaf in out), strict=True):
                if leaf.data_ptr() != row.data_ptr():
                    row.copy_(leaf)


def _select_rows(leaf: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of a leaf (C, ...); one that all clients share stays shared."""
    if isinstance(rows, slice):
        return leaf[rows]
    if leaf.dim() and len(leaf) > 1 and not leaf.stride(0):
        return leaf[:1].expand(len(rows), *leaf.shape[1:])
    return leaf[rows]
