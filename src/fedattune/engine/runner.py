"""Run the local steps of several clients: side by side as one batch of models, or one client after the other."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor

from ..core.hardware import balance
from ..core.params import as_slice, copy_dense
from ..data import Federation
from ..data.augmentation import split_moves
from ..data.on_disk import RowsOnDisk
from ..data.types import Index
from ..privacy.dp_sgd import ClientNoise, StepNoise
from .compiler import CompiledStep, StepBatches


@dataclass(frozen=True)
class Lanes:
    """Clients in lanes that run side by side; each lane trains its clients one after the other.

    Attributes:
        clients: per lane, its clients in order.
        switches: step -> lanes whose client finished with the step before.
        steps: number of steps of the longest lane.
    """

    clients: list[list[int]]
    switches: dict[int, list[int]]
    steps: int

    @property
    def is_uniform(self) -> bool:
        return all(len(lane) == 1 for lane in self.clients) and list(self.switches) in ([], [self.steps])


def pack_lanes(counts: Sequence[int], at_once: int = 1) -> list[Lanes]:
    """Pack clients into lanes of about equal length, and divide the lanes into `at_once` groups if there are enough.

    The steps of all clients, divided by the steps of the longest client, give the number of lanes. This number is
    rounded up to a multiple of `at_once`, so that groups are equal. Clients without a step are in no lane.
    """
    longest, clients = max(counts), sum(n > 0 for n in counts)
    width = clients if min(counts) == longest else ceil(sum(counts) / longest)
    width = min(clients, at_once * ceil(width / at_once))
    lanes = [[i for i in lane if counts[i]] for lane in balance(counts, width)]
    groups = min(at_once, width)
    cuts = [width * i // groups for i in range(groups + 1)]
    return [_build_lanes(lanes[start:stop], counts) for start, stop in pairwise(cuts)]


def _build_lanes(clients: list[list[int]], counts: Sequence[int]) -> Lanes:
    switches: dict[int, list[int]] = {}
    for number, lane in enumerate(clients):
        for step in accumulate(counts[i] for i in lane):
            switches.setdefault(step, []).append(number)
    return Lanes(clients, switches, max(switches))


def batch_indices(lanes: Lanes, batches: Sequence[Index]) -> Index:
    """Lay out sample numbers (steps, lanes, per step, batch), -1 for padding.

    A finished lane repeats its last step; nobody reads the result.
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


def _batch_owners(lanes: Lanes, batches: Sequence[Index]) -> Index:
    """Lay out whose step each lane takes (steps, lanes), -1 for the repeated last step of a finished lane."""
    owners = np.full((lanes.steps, len(lanes.clients)), -1, dtype=np.int64)
    for number, lane in enumerate(lanes.clients):
        own = np.repeat(lane, [len(batches[client]) for client in lane])
        owners[: len(own), number] = own
    return owners


DISK_CHUNK_BYTES = 1 << 28
"""Samples that are read at once from files for the steps of a call."""

MAX_STEPS_PER_CALL = 1 << 10
"""Steps of one call; a second Ctrl-C waits for the end of a call."""

StepFactory = Callable[[Sequence[Tensor], Sequence[Tensor]], CompiledStep]
"""Makes a compiled step for leaves and a batch like the given ones."""


class BatchSequence:
    """The batches of all steps: sample numbers (steps, ..., per step, B), -1 for padding.

    A step of one mini-batch has no axis `per step`. With `noise`, gradients are private, and samples have its weights.
    Without lanes, `noise` has one.
    """

    def __init__(
        self, filled: Index, federation: Federation, dtype: torch.dtype, noise: StepNoise | None = None
    ) -> None:
        device = federation.y.device
        index = torch.as_tensor(filled, device=device)
        index = index.squeeze(-2) if index.shape[-2] == 1 else index
        self.padded = [least < 0 for least in filled.reshape(len(filled), -1).min(1).tolist()]
        self._weights = (index >= 0).to(dtype) if noise or any(self.padded) else None
        self._noise, self._has_lanes = noise, filled.ndim > 3
        if noise is not None and self._weights is not None:
            self.padded = [True] * len(filled)
            weights = noise.weights if self._has_lanes else noise.weights[:, 0]
            self._weights *= weights.view(*weights.shape, *[1] * (index.dim() - weights.dim()))
        self._samples = federation.samples(dtype)
        self._index, self._moves = split_moves(index.clamp_min(0))
        self._labels = federation.y[self._index]
        self._features = partial(federation.features, dtype=dtype)
        self._max_steps = MAX_STEPS_PER_CALL
        if isinstance(federation.x, RowsOnDisk):
            step_bytes = self._index[0].numel() * math.prod(federation.input_shape) * federation.x.dtype.itemsize
            self._max_steps = max(1, min(self._max_steps, DISK_CHUNK_BYTES // max(1, step_bytes)))

    @property
    def batch_size(self) -> int:
        return self._index[0].numel()

    def gather(self, t: int) -> tuple[Tensor, ...]:
        """Gather the batch of step t: inputs, labels, and weights if there is padding."""
        moves = None if self._moves is None else self._moves[t]
        x, y = self._features(self._index[t], moves=moves), self._labels[t]
        if self._weights is None or not self.padded[t]:
            return x, y
        if self._noise is None:
            return x, y, self._weights[t]
        example = self._noise.example()
        return x, y, self._weights[t], example if self._has_lanes else example[0]

    def run(self, step: CompiledStep, ready: list[Tensor], moving: list[Tensor], first: int, last: int) -> list[Tensor]:
        """Run the steps `first` to `last` - 1, which either all have padding or all have none."""
        weights = self._weights if self.padded[first] else None
        noise = None if self._noise is None else self._noise.draw(first, last)
        if noise is not None and not self._has_lanes:
            noise = noise[:, 0]
        x, shift, scale = self._samples
        if isinstance(x, RowsOnDisk):
            read = x.read(self._index[first:last])
            rows = torch.arange(len(read), device=read.device).view_as(self._index[first:last])
            moves, weights = (None if one is None else one[first:last] for one in (self._moves, weights))
            batches = StepBatches(read, shift, scale, rows, moves, self._labels[first:last], weights, noise)
            first, last = 0, last - first
        else:
            batches = StepBatches(x, shift, scale, self._index, self._moves, self._labels, weights, noise)
        moved: list[Tensor] = step.run_steps(first, last, ready, moving, batches)
        return moved

    def uniform_spans(self, cuts: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
        """List the ranges of steps (first, last + 1) between `cuts` with or without padding throughout."""
        at_once = min(self._max_steps, self._noise.steps_at_once if self._noise else self._max_steps)
        kinds = (t for t in range(1, len(self.padded)) if self.padded[t] != self.padded[t - 1])
        return pairwise(sorted({*range(0, len(self.padded), at_once), *kinds, *cuts, len(self.padded)}))


class BatchedRunner:
    """Run lanes of clients side by side, on a client axis.

    `fixed` are tensors that all clients share, `leaves` the carries, buffers and so on (C, ...) of all clients. `rows`
    are the rows of the first client of each lane: a slice if each lane has one client.
    """

    def __init__(
        self,
        lanes: Lanes,
        batches: Sequence[Index],
        fixed: Sequence[Tensor],
        leaves: Sequence[Tensor],
        federation: Federation,
        dtype: torch.dtype,
        noises: Sequence[ClientNoise] = (),
    ) -> None:
        self.lanes, self._fixed = lanes, fixed
        first = torch.tensor([lane[0] for lane in lanes.clients], device=federation.y.device)
        self.rows = as_slice(first) if lanes.is_uniform else first
        self.leaves = [_select_rows(leaf, self.rows) for leaf in leaves]
        owners, device = _batch_owners(lanes, batches), federation.y.device
        noise = StepNoise(noises, owners, dtype, device) if noises else None
        self._batches = BatchSequence(batch_indices(lanes, batches), federation, dtype, noise)

    def prepare(self, maker: StepFactory) -> list[CompiledStep]:
        """Compile the steps that `run` needs, one for batches with padding, one for batches without.

        Their constant inputs are computed here: threads of several groups would wait for the interpreter's lock.
        """
        padded = self._batches.padded
        self._steps = {kind: maker(self.leaves, self._batches.gather(padded.index(kind))) for kind in set(padded)}
        self._first_ready = self._ready(dict(enumerate(self.leaves)))
        return list(self._steps.values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Operations, values of all leaves, and samples of a step, on which its time depends."""
        operations = max(step.operations for step in self._steps.values())
        return operations, sum(leaf.numel() for leaf in self.leaves), self._batches.batch_size

    def try_steps(self) -> None:
        """Run steps on copies, to measure them; the random numbers of the round do not shift."""
        with torch.random.fork_rng(devices=[]):
            for padded, step in self._steps.items():
                batch = self._batches.gather(self._batches.padded.index(padded))
                step.run_twice(self._fixed, self.leaves, batch)

    def run(self, start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Run all steps from `start` (C, ...), and write the moving leaves to the clients' rows of `out`.

        `out` begins as a copy of `start`; the steps may write over `start`.
        """
        moving = sorted({i for step in self._steps.values() for i in step.moving})
        current = dict(enumerate(self.leaves))
        in_place = isinstance(self.rows, slice)
        for i in moving:
            current[i] = out[i][self.rows] if in_place else copy_dense(current[i])
        ready = self._first_ready
        queues = [list(lane) for lane in self.lanes.clients]
        switches = {} if self.lanes.is_uniform else self.lanes.switches
        # The step with padding may change leaves that are constant inputs of the other step.
        differ = len({step.moving for step in self._steps.values()}) > 1
        for first, last in self._batches.uniform_spans(switches):
            if first in switches:
                self._switch(switches[first], queues, current, start, out, moving)
            if first and (first in switches or differ):
                ready = self._ready(current)
            padded = self._batches.padded[first]
            step = self._steps[padded]
            new = self._batches.run(step, ready[padded], [current[i] for i in step.moving], first, last)
            current.update(zip(step.moving, new, strict=True))
        if in_place:
            for i in moving:
                if current[i].data_ptr() != out[i][self.rows].data_ptr():
                    out[i][self.rows] = current[i]
        elif self.lanes.is_uniform:  # some clients take no step
            for i in moving:
                out[i][self.rows] = current[i]
        else:
            self._switch(switches[self.lanes.steps], queues, current, start, out, moving)

    def _ready(self, current: dict[int, Tensor]) -> dict[bool, list[Tensor]]:
        """Compute the constant inputs of the steps from the leaves that stay; they are the same for both steps."""
        leaves = [current[i] for i in range(len(current))]
        return {
            padded: step.precompute(*self._fixed, *step.select_constant(leaves)) for padded, step in self._steps.items()
        }

    def _switch(
        self,
        lanes: Sequence[int],
        queues: list[list[int]],
        current: dict[int, Tensor],
        start: Sequence[Tensor],
        out: Sequence[Tensor],
        moving: Sequence[int],
    ) -> None:
        for lane in lanes:
            finished = queues[lane].pop(0)
            for i in moving:
                out[i][finished] = current[i][lane]
            if queues[lane]:
                for i, leaf in current.items():
                    if leaf.stride(0) or i in moving:  # else all clients share it
                        leaf[lane] = start[i][queues[lane][0]]


class SerialRunner:
    """Run clients one after the other, without a client axis."""

    def __init__(
        self,
        clients: Sequence[int],
        batches: Sequence[Index],
        fixed: Sequence[Tensor],
        leaves: Sequence[Tensor],
        federation: Federation,
        dtype: torch.dtype,
        noises: Sequence[ClientNoise] = (),
    ) -> None:
        self._fixed, self._leaves = fixed, leaves

        def noise(i: int) -> StepNoise | None:
            one_lane = np.full((len(batches[i]), 1), i)
            return StepNoise(noises, one_lane, dtype, federation.y.device) if noises else None

        self._batches = {i: BatchSequence(batches[i], federation, dtype, noise(i)) for i in clients}
        self._sizes = {i: batches[i].shape[2] for i in clients}

    def prepare(self, maker: StepFactory) -> list[CompiledStep]:
        """Compile the steps that `run` needs: one for every batch size, with padding and without."""
        self._steps: dict[tuple[int, bool], CompiledStep] = {}
        for client, batches in self._batches.items():
            for t, padded in enumerate(batches.padded):
                if (kind := (self._sizes[client], padded)) not in self._steps:
                    first = [leaf[client] for leaf in self._leaves]
                    self._steps[kind] = maker(first, batches.gather(t))
        return list(self._steps.values())

    def run(self, start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        for client, batches in self._batches.items():
            current = [leaf[client] for leaf in out]
            for first, last in batches.uniform_spans():
                step = self._steps[self._sizes[client], batches.padded[first]]
                ready = step.precompute(*self._fixed, *step.select_constant(current))
                new = batches.run(step, ready, [current[i] for i in step.moving], first, last)
                for i, leaf in zip(step.moving, new, strict=True):
                    current[i] = leaf
            for leaf, row in zip(current, (leaf[client] for leaf in out), strict=True):
                if leaf.data_ptr() != row.data_ptr():
                    row.copy_(leaf)


def _select_rows(leaf: Tensor, rows: Tensor | slice) -> Tensor:
    """Select rows of a leaf (C, ...); a leaf that all clients share stays shared."""
    if isinstance(rows, slice):
        return leaf[rows]
    if leaf.dim() and len(leaf) > 1 and not leaf.stride(0):
        return leaf[:1].expand(len(rows), *leaf.shape[1:])
    return leaf[rows]
