"""The local steps of several clients: side by side as one batch of models, or one client after the other."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import Federation
from .lanes import Lanes, laid_out
from .step import Step, dense

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
        filled, padded = laid_out(lanes, batches)
        index = torch.as_tensor(filled, device=device)
        index = index.squeeze(2) if index.shape[2] == 1 else index
        real = index.clamp_min(0) if padded else index
        self._gather = federation.gatherer(dtype)
        self._samples = real.unbind()
        self._others = [federation.y[real].unbind(), *([(index >= 0).to(dtype).unbind()] if padded else [])]

    def prepare(self, maker: Maker) -> list[Step]:
        """Make the steps ready that `run` takes."""
        self._step = maker(self.leaves, self._batch(0))
        return [self._step]

    def _batch(self, t: int) -> tuple[Tensor, ...]:
        """The batch (lanes, ...) of step t."""
        return (self._gather(self._samples[t]), *(tensors[t] for tensors in self._others))

    def run(self, fixed: Sequence[Tensor], start: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Do all steps from `start` (C, ...); the leaves that move are written to the clients' rows of `out`.

        `out` begins as a copy of `start`, which may be written over.
        """
        step = self._step
        moving = list(step.moving)
        staying = [i for i in range(len(start)) if i not in set(moving)]
        here = dict(enumerate(self.leaves))
        in_place = isinstance(self.rows, slice)
        for i in moving:
            here[i] = out[i][self.rows] if in_place else dense(here[i])
        ready = step.before(*fixed, *(here[i] for i in staying))
        waiting = [list(lane) for lane in self.lanes.clients]
        for t in range(self.lanes.steps):
            if not in_place and t in self.lanes.changes:
                self._change(self.lanes.changes[t], waiting, here, start, out, moving)
                ready = step.before(*fixed, *(here[i] for i in staying))
            new = step.body(*ready, *(here[i] for i in moving), *self._batch(t))
            here.update(zip(moving, new, strict=True))
        if in_place:
            for i in moving:
                if here[i].data_ptr() != out[i][self.rows].data_ptr():
                    out[i][self.rows] = here[i]
        else:
            self._change(self.lanes.changes[self.lanes.steps], waiting, here, start, out, moving)

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
