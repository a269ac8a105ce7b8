"""The local steps of several clients: side by side as one batch of models, or one client after the other."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import Federation
from .lanes import Lanes, laid_out
from .step import Step, dense

GATHERED_BYTES = 1 << 20
"""Batches that are gathered at once: what stays in a core's own cache until it is used."""

Maker = Callable[[Sequence[Tensor], Sequence[Tensor]], Step]
"""Makes a step ready for leaves and a batch like these."""


class Group:
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
        device = federation.y.device
        self.rows: Tensor | slice = (
            slice(first[0], first[0] + len(first)) if whole else torch.tensor(first, device=device)
        )
        self.leaves = [_rows(leaf, self.rows) for leaf in leaves]
        filled = laid_out(lanes, batches)
        index = torch.as_tensor(filled, device=device)
        index = index.squeeze(2) if index.shape[2] == 1 else index
        self._samples, self._gather = index.clamp_min(0), federation.gatherer(dtype)
        self._y = federation.y[self._samples].unbind()
        self._weights = (index >= 0).to(dtype).unbind()
        self.padded = [bool(step.any()) for step in filled < 0]
        size = index[0].numel() * math.prod(federation.input_shape) * dtype.itemsize
        self._ahead = max(1, GATHERED_BYTES // size)
        self._gathered: tuple[Tensor, ...] = ()

    def prepare(self, maker: Maker) -> list[Step]:
        """Make the steps ready that `run` takes: one for batches with padding, one for those without."""
        self._steps = {
            padded: maker(self.leaves, self._batch(self.padded.index(padded))) for padded in set(self.padded)
        }
        return list(self._steps.values())

    def _batch(self, t: int) -> tuple[Tensor, ...]:
        """The batch (lanes, ...) of step t."""
        x = self._gather(self._samples[t])
        return (x, self._y[t], self._weights[t]) if self.padded[t] else (x, self._y[t])

    def _next_batch(self, t: int) -> tuple[Tensor, ...]:
        """The same, where batches are asked for in order; small ones are gathered several steps ahead."""
        if self._ahead == 1:
            return self._batch(t)
        if t % self._ahead == 0:
            self._gathered = self._gather(self._samples[t : t + self._ahead]).unbind()
        x = self._gathered[t % self._ahead]
        return (x, self._y[t], self._weights[t]) if self.padded[t] else (x, self._y[t])

    def run(self, fixed: Sequence[Tensor], start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Do all steps from `start` (C, ...); the leaves that move are written to the clients' rows of `out`.

        `out` begins as a copy of `start`, which may be written over.
        """
        moving = sorted({i for step in self._steps.values() for i in step.moving})
        here = dict(enumerate(self.leaves))
        in_place = isinstance(self.rows, slice)
        for i in moving:
            here[i] = out[i][self.rows] if in_place else dense(here[i])
        ready = self._ready(fixed, here)
        waiting = [list(lane) for lane in self.lanes.clients]
        for t in range(self.lanes.steps):
            if not in_place and t in self.lanes.changes:
                self._change(self.lanes.changes[t], waiting, here, start, out, moving)
                ready = self._ready(fixed, here)
            step = self._steps[self.padded[t]]
            new = step.body(*ready[self.padded[t]], *(here[i] for i in step.moving), *self._next_batch(t))
            here.update(zip(step.moving, new, strict=True))
        if in_place:
            for i in moving:
                if here[i].data_ptr() != out[i][self.rows].data_ptr():
                    out[i][self.rows] = here[i]
        else:
            self._change(self.lanes.changes[self.lanes.steps], waiting, here, start, out, moving)

    def _ready(self, fixed: Sequence[Tensor], here: dict[int, Tensor]) -> dict[bool, Sequence[Tensor]]:
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


class Line:
    """Clients one after the other, without a client axis."""

    def __init__(
        self,
        clients: Sequence[int],
        batches: Sequence[NDArray[np.int64]],
        leaves: Sequence[Tensor],
        federation: Federation,
        dtype: torch.dtype,
    ) -> None:
        self.clients, self.federation, self.dtype = clients, federation, dtype
        self._leaves = leaves
        device = federation.y.device
        self._batches = {i: [torch.as_tensor(b, device=device) for b in batches[i]] for i in clients}

    def prepare(self, maker: Maker) -> list[Step]:
        """Make the steps ready that `run` takes: one for every size of batch, with padding and without."""
        self._steps: dict[tuple[int, bool], Step] = {}
        for client in self.clients:
            for index in self._batches[client]:
                if (kind := _kind(index)) not in self._steps:
                    first = [leaf[client] for leaf in self._leaves]
                    self._steps[kind] = maker(first, self._batch(index))
        return list(self._steps.values())

    def _batch(self, index: Tensor) -> tuple[Tensor, ...]:
        """The batch of sample numbers (per step, B); one mini-batch alone has no leading axis."""
        index = index if len(index) > 1 else index[0]
        real = index.clamp_min(0)
        x, y = self.federation.features(real, self.dtype), self.federation.y[real]
        return (x, y, (index >= 0).to(self.dtype)) if (index < 0).any() else (x, y)

    def run(self, fixed: Sequence[Tensor], start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Do all steps from `start` (C, ...); the leaves that move are written to the clients' rows of `out`."""
        for client in self.clients:
            here = [leaf[client] for leaf in out]
            for index in self._batches[client]:
                step = self._steps[_kind(index)]
                ready = step.before(*fixed, *step.staying(here))
                new = step.body(*ready, *(here[i] for i in step.moving), *self._batch(index))
                for i, leaf in zip(step.moving, new, strict=True):
                    here[i] = leaf
            for leaf, row in zip(here, (leaf[client] for leaf in out), strict=True):
                if leaf.data_ptr() != row.data_ptr():
                    row.copy_(leaf)


def _kind(index: Tensor) -> tuple[int, bool]:
    return index.shape[1], bool((index < 0).any())


def _rows(leaf: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of a leaf (C, ...); one that all clients share stays shared."""
    if isinstance(rows, slice):
        return leaf[rows]
    if leaf.dim() and len(leaf) > 1 and not leaf.stride(0):
        return leaf[:1].expand(len(rows), *leaf.shape[1:])
    return leaf[rows]
