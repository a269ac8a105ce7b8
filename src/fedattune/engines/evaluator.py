"""Evaluation of many clients' models: small parts as padded blocks of several clients, large ones alone."""

import copy
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from ..data import Federation
from ..params import Params
from ..task import Task
from .base import Held, Scores, score
from .machine import cores, run_all

CHUNK_BYTES = 1 << 28
"""Working memory that one block may take."""

CACHE_BYTES = 1 << 28
"""Inputs of blocks that may stay in memory between rounds."""

LARGE = 256
"""Samples from which on a client's part is evaluated alone: its model's operations then are large enough."""


class Evaluator:
    """Evaluates a model of its own for every client; `alone`: without a client axis, however small the parts are."""

    def __init__(
        self, task: Task, federation: Federation, dtype: torch.dtype, *, alone: bool = False
    ) -> None:
        self.federation, self.dtype, self.alone = federation, dtype, alone
        self.device = federation.y.device
        # A module takes the weights of one call at a time, so every core has its own.
        self._tasks = [task, *(Task(copy.deepcopy(task.model)) for _ in range(cores(self.device) - 1))]
        values = max(1, math.prod(federation.input_shape))
        self._at_once = max(64, min(1024, CHUNK_BYTES // (64 * values)))
        self._kept: dict[str, tuple[list[int], list[_Block]]] = {}

    def evaluate(self, params: Params, buffers: Params, part: Held, ids: Tensor) -> Scores:
        """Evaluate models (E, ...) of clients `ids` (E,), each on its own part."""
        sizes = self.federation.sizes(part)[ids.cpu()].to(self.device)
        correct = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(sizes), dtype=torch.float64, device=self.device)
        scores = Scores(sizes, correct, loss)
        large = [i for i, n in enumerate(sizes.tolist()) if n >= LARGE or (self.alone and n)]
        lines = [large[i :: len(self._tasks)] for i in range(len(self._tasks))]
        samples = self.federation.part(part)
        run_all(
            [
                partial(
                    self._singly, task, line, params, buffers, [samples[int(ids[i])] for i in line], scores
                )
                for task, line in zip(self._tasks, lines, strict=True)
                if line
            ]
        )
        if not self.alone:
            self._together(params, buffers, part, ids, scores)
        return scores

    def _singly(
        self,
        task: Task,
        rows: list[int],
        params: Params,
        buffers: Params,
        samples: list[NDArray[np.int64]],
        scores: Scores,
    ) -> None:
        """Evaluate models `rows`, one after the other."""
        for row, own in zip(rows, samples, strict=True):
            model, state = params.rows(row), buffers.rows(row)
            for index in torch.split(torch.as_tensor(own, device=self.device), self._at_once):
                logits = task.predict(model, state, self.federation.features(index, self.dtype))
                right, losses = score(logits, self.federation.y[index])
                scores.correct[row] += right.sum()
                scores.loss[row] += losses.sum().double()

    def _together(self, params: Params, buffers: Params, part: Held, ids: Tensor, scores: Scores) -> None:
        """Evaluate clients with small parts, those with about as many samples as one batch of models."""
        predict = vmap(self._tasks[0].predict, randomness="different")
        for block in self._blocks(part, ids.tolist()):
            x = self.federation.features(block.samples, self.dtype) if block.x is None else block.x
            logits = predict(params.rows(block.rows), buffers.rows(block.rows), x)
            right, losses = score(logits.flatten(0, 1), block.y.flatten())
            scores.loss[block.rows] = (losses.view_as(block.real) * block.real).sum(1).double()
            scores.correct[block.rows] = (right.view_as(block.real) & block.real).sum(1)

    def _blocks(self, part: Held, ids: list[int]) -> list["_Block"]:
        """The samples of clients `ids` as padded blocks, kept while the same are asked for and they are small."""
        kept = self._kept.get(part)
        if kept is None or kept[0] != ids:
            parts = self.federation.part(part)
            samples = [p if len(p := parts[i]) < LARGE else p[:0] for i in ids]
            values = int(np.prod(self.federation.input_shape)) * self.dtype.itemsize
            keep = sum(len(s) for s in samples) * values < CACHE_BYTES
            blocks = _blocks([len(s) for s in samples], max(1, CHUNK_BYTES // (8 * values)))
            kept = ids, [self._pad(rows, samples, keep) for rows in blocks]
            self._kept[part] = kept
        return kept[1]

    def _pad(self, rows: list[int], samples: list[NDArray[np.int64]], keep: bool) -> "_Block":
        longest = max(len(samples[c]) for c in rows)
        index = np.zeros((len(rows), longest), dtype=np.int64)
        real = np.zeros(index.shape, dtype=bool)
        for row, mask, client in zip(index, real, rows, strict=True):
            row[: len(samples[client])] = samples[client]
            mask[: len(samples[client])] = True
        where = torch.as_tensor(index, device=self.device)
        return _Block(
            torch.tensor(rows, device=self.device),
            where,
            self.federation.features(where, self.dtype) if keep else None,
            self.federation.y[where],
            torch.as_tensor(real, device=self.device),
        )


class _Block(NamedTuple):
    """Samples (C, m) of C models, padded to the longest; `rows` numbers these, `real` is false on padding."""

    rows: Tensor
    samples: Tensor
    x: Tensor | None
    y: Tensor
    real: Tensor


def _blocks(sizes: list[int], most: int) -> list[list[int]]:
    """Groups of clients of similar size (padding at most doubles the work) with at most `most` padded samples."""
    blocks: list[list[int]] = []
    for client in sorted(range(len(sizes)), key=lambda c: -sizes[c]):
        if not sizes[client]:
            break
        longest = sizes[blocks[-1][0]] if blocks else 0
        if blocks and 2 * sizes[client] >= longest and (len(blocks[-1]) + 1) * longest <= most:
            blocks[-1].append(client)
        else:
            blocks.append([client])
    return blocks
