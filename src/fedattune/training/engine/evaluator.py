"""Evaluation of many clients' models: small parts as padded blocks of several clients, large ones alone."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from ...core.hardware import count_parallel_groups, run_parallel
from ...core.params import Params
from ...core.task import Task
from ...data import Federation
from .base import EvalPart, Scores, score_samples
from .kernels import FastPrediction

EVAL_CHUNK_BYTES = 1 << 28
"""Working memory that one block may take."""


INPUT_CACHE_BYTES = 1 << 28
"""Inputs of a held-out part that stay in memory between rounds, ready for the model, if they are not more."""


LARGE_PART_SAMPLES = 256
"""Samples from which on a client's part is evaluated alone: its model's operations then are large enough."""


MAX_PENDING_LOGITS = 1 << 20
"""Logits that are scored at once."""


class Evaluator:
    """Evaluates a model of its own for every client; `alone`: without a client axis, however small the parts are."""

    def __init__(
        self, task: Task, federation: Federation, dtype: torch.dtype, *, alone: bool = False
    ) -> None:
        self.federation, self.dtype, self.alone = federation, dtype, alone
        self.device = federation.y.device
        self._tasks, self._cores = [task], count_parallel_groups(self.device)
        values = max(1, math.prod(federation.input_shape))
        self._at_once = max(64, min(4096, EVAL_CHUNK_BYTES // (64 * values)))
        self._kept: dict[str, _EvalSamples] = {}

    def evaluate(self, params: Params, buffers: Params, part: EvalPart, ids: Tensor) -> Scores:
        """Evaluate models (E, ...) of clients `ids` (E,), each on its own part."""
        sizes = self.federation.sizes(part)[ids.cpu()].to(self.device)
        correct = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(sizes), dtype=torch.float64, device=self.device)
        scores = Scores(sizes, correct, loss)
        held = self._held(part, ids.tolist())
        if held.alone:  # a module takes the weights of one call at a time, so every core has its own
            self._tasks += [self._tasks[0].twin() for _ in range(self._cores - len(self._tasks))]
        lines: list[list[_LargePart]] = [[] for _ in self._tasks]
        for own in sorted(held.alone, key=lambda own: -len(own.y)):
            min(lines, key=lambda line: sum(len(one.y) for one in line)).append(own)
        run_parallel(
            [
                partial(self._singly, task, line, params, buffers, scores)
                for task, line in zip(self._tasks, lines, strict=True)
                if line
            ]
        )
        self._together(params, buffers, held.together, scores)
        return scores

    def _singly(
        self, task: Task, line: list["_LargePart"], params: Params, buffers: Params, scores: Scores
    ) -> None:
        """Evaluate some models, one after the other; several are scored at once, as that takes many small calls."""
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for row, samples, x, y in line:
            model, state = params.rows(row), buffers.rows(row)
            for at in range(0, len(y), self._at_once):
                some = slice(at, at + self._at_once)
                inputs = self.federation.features(samples[some], self.dtype) if x is None else x[some]
                with FastPrediction():
                    waiting.append((row, task.predict(model, state, inputs), y[some]))
                if sum(logits.numel() for _, logits, _ in waiting) > MAX_PENDING_LOGITS:
                    _add_scores(waiting, scores)
                    waiting = []
        if waiting:
            _add_scores(waiting, scores)

    def _together(
        self, params: Params, buffers: Params, blocks: list["_PaddedBlock"], scores: Scores
    ) -> None:
        """Evaluate clients with small parts, those with about as many samples as one batch of models."""
        predict = vmap(self._tasks[0].predict, randomness="different")
        for block in blocks:
            x = self.federation.features(block.samples, self.dtype) if block.x is None else block.x
            logits = predict(params.rows(block.rows), buffers.rows(block.rows), x)
            right, losses = score_samples(logits.flatten(0, 1), block.y.flatten())
            scores.loss[block.rows] = losses.view_as(block.real).masked_fill(~block.real, 0).sum(1).double()
            scores.correct[block.rows] = (right.view_as(block.real) & block.real).sum(1)

    def _held(self, part: EvalPart, ids: list[int]) -> "_EvalSamples":
        """The part's samples of clients `ids`, kept while the same are asked for."""
        kept = self._kept.get(part)
        if kept is None or kept.ids != ids:
            parts = self.federation.part(part)
            samples = [parts[i] for i in ids]
            size = math.prod(self.federation.input_shape) * self.dtype.itemsize
            keep = sum(len(s) for s in samples) * size < INPUT_CACHE_BYTES
            large = [self.alone or len(s) >= LARGE_PART_SAMPLES for s in samples]
            alone = [self._own(row, s, keep) for row, s in enumerate(samples) if large[row] and len(s)]
            small = [0 if large[row] else len(s) for row, s in enumerate(samples)]
            blocks = _group_by_size(small, max(1, EVAL_CHUNK_BYTES // (8 * size)))
            kept = _EvalSamples(ids, alone, [self._pad(rows, samples, keep) for rows in blocks])
            self._kept[part] = kept
        return kept

    def _own(self, row: int, samples: NDArray[np.int64], keep: bool) -> "_LargePart":
        where = torch.as_tensor(samples, device=self.device)
        x = self.federation.features(where, self.dtype) if keep else None
        return _LargePart(row, where, x, self.federation.y[where])

    def _pad(self, rows: list[int], samples: list[NDArray[np.int64]], keep: bool) -> "_PaddedBlock":
        longest = max(len(samples[c]) for c in rows)
        index = np.zeros((len(rows), longest), dtype=np.int64)
        real = np.zeros(index.shape, dtype=bool)
        for row, mask, client in zip(index, real, rows, strict=True):
            row[: len(samples[client])] = samples[client]
            mask[: len(samples[client])] = True
        where = torch.as_tensor(index, device=self.device)
        return _PaddedBlock(
            torch.tensor(rows, device=self.device),
            where,
            self.federation.features(where, self.dtype) if keep else None,
            self.federation.y[where],
            torch.as_tensor(real, device=self.device),
        )


def _add_scores(found: list[tuple[int, Tensor, Tensor]], scores: Scores) -> None:
    """Add up what models, given by their number, made of samples: their logits, and the labels."""
    rows, logits, y = zip(*found, strict=True)
    right, losses = score_samples(torch.cat(logits), torch.cat(y))
    sizes = [len(one) for one in y]
    for row, own_right, own_losses in zip(
        rows, torch.split(right, sizes), torch.split(losses, sizes), strict=True
    ):
        scores.correct[row] += own_right.sum()
        scores.loss[row] += own_losses.sum().double()


class _LargePart(NamedTuple):
    """One model's samples (m,), their labels, and their inputs (m, ...) if these are kept; `row` is its number."""

    row: int
    samples: Tensor
    x: Tensor | None
    y: Tensor


class _PaddedBlock(NamedTuple):
    """Samples (C, m) of C models, padded to the longest; `rows` numbers these, `real` is false on padding."""

    rows: Tensor
    samples: Tensor
    x: Tensor | None
    y: Tensor
    real: Tensor


class _EvalSamples(NamedTuple):
    """All samples that clients `ids` are evaluated on: of large parts alone, of small ones together."""

    ids: list[int]
    alone: list[_LargePart]
    together: list[_PaddedBlock]


def _group_by_size(sizes: list[int], most: int) -> list[list[int]]:
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
