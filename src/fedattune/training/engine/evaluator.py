"""Evaluate one model per client: small parts as padded blocks of several clients, large parts alone."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...core.hardware import MIN_PARALLEL_WORK, balance, count_parallel_groups, run_parallel, use_threads
from ...core.params import Params
from ...core.task import Task
from ...data import Federation
from ...data.types import Index
from .base import EvalPart, Scores, score_samples
from .kernels import FastPrediction

EVAL_CHUNK_BYTES = 1 << 28
"""Working memory of one block."""


INPUT_CACHE_BYTES = 1 << 28
"""Model inputs of an evaluated part that stay in memory between rounds, if they take less than this."""


LARGE_PART_WORK = 1 << 23
"""Samples times parameters from which a client's part is evaluated alone: to call a model takes as long as these
products."""


class Evaluator:
    """Evaluate one model per client; `is_serial` runs every model without a client axis, also for small parts."""

    def __init__(
        self, task: Task, federation: Federation, dtype: torch.dtype, *, is_serial: bool = False
    ) -> None:
        self.federation, self.dtype, self.is_serial = federation, dtype, is_serial
        self.device = federation.y.device
        self._tasks, self._cores = [task], count_parallel_groups(self.device)
        values = max(1, math.prod(federation.input_shape))
        self._at_once = task.limit_samples(max(64, min(4096, EVAL_CHUNK_BYTES // (64 * values))), values)
        self._cache: dict[str, _EvalSamples] = {}

    def evaluate(self, params: Params, buffers: Params, part: EvalPart, ids: Tensor) -> Scores:
        """Evaluate models (E, ...) of clients `ids` (E,), each on its own part."""
        sizes = self.federation.sizes(part)[ids.cpu()].to(self.device)
        scores = Scores.zeros(sizes)
        samples = self._gather(part, ids.tolist())
        if samples.large_parts:
            # A module holds the weights of one call at a time, so each core needs its own.
            self._tasks += [self._tasks[0].twin() for _ in range(self._cores - len(self._tasks))]
        groups = balance([len(one.y) for one in samples.large_parts], len(self._tasks))
        run_parallel(
            [
                partial(
                    self._evaluate_part,
                    task,
                    [samples.large_parts[i] for i in group],
                    params,
                    buffers,
                    scores,
                )
                for task, group in zip(self._tasks, groups, strict=True)
                if group
            ]
        )
        self._evaluate_blocks(params, buffers, samples.together, scores)
        return scores

    def _evaluate_part(
        self, task: Task, group: list["_LargePart"], params: Params, buffers: Params, scores: Scores
    ) -> None:
        """Evaluate models one after the other."""
        for row, samples, x, y in group:
            model, state = params.rows(row), buffers.rows(row)
            for at in range(0, len(y), self._at_once):
                part = slice(at, at + self._at_once)
                inputs = self.federation.features(samples[part], self.dtype) if x is None else x[part]
                with FastPrediction():
                    correct, losses = score_samples(task.predict(model, state, inputs), y[part])
                scores.correct[row] += correct.sum()
                scores.loss[row] += losses.sum().double()

    def _evaluate_blocks(
        self, params: Params, buffers: Params, blocks: list["_PaddedBlock"], scores: Scores
    ) -> None:
        """Evaluate clients with small parts: clients with similar numbers of samples form one batch of models."""
        if not blocks:
            return
        predict = vmap(self._tasks[0].predict, randomness="different")
        work = self._tasks[0].params.numel() * max(block.samples.numel() for block in blocks)
        with use_threads(1 if work < MIN_PARALLEL_WORK else torch.get_num_threads()):
            for block in blocks:
                x = self.federation.features(block.samples, self.dtype) if block.x is None else block.x
                logits = predict(params.rows(block.rows), buffers.rows(block.rows), x)
                correct, losses = score_samples(logits.flatten(0, 1), block.y.flatten())
                scores.loss[block.rows] = (
                    losses.view_as(block.real).masked_fill(~block.real, 0).sum(1).double()
                )
                scores.correct[block.rows] = (correct.view_as(block.real) & block.real).sum(1)

    def _gather(self, part: EvalPart, ids: list[int]) -> "_EvalSamples":
        """Gather the part's samples of clients `ids`; keep them until other clients are evaluated."""
        cached = self._cache.get(part)
        if cached is None or cached.ids != ids:
            parts = self.federation.part(part)
            samples = [parts[i] for i in ids]
            size = math.prod(self.federation.input_shape) * self.dtype.itemsize
            keep = sum(len(s) for s in samples) * size < INPUT_CACHE_BYTES
            n_params = self._tasks[0].params.numel()
            large = [self.is_serial or len(s) * n_params >= LARGE_PART_WORK for s in samples]
            large_parts = [
                self._load_part(row, s, keep) for row, s in enumerate(samples) if large[row] and len(s)
            ]
            small = [0 if large[row] else len(s) for row, s in enumerate(samples)]
            most = self._tasks[0].limit_samples(
                max(1, EVAL_CHUNK_BYTES // (8 * size)), math.prod(self.federation.input_shape)
            )
            blocks = _group_by_size(small, most)
            cached = _EvalSamples(
                ids, large_parts, [self._load_block(rows, samples, keep) for rows in blocks]
            )
            self._cache[part] = cached
        return cached

    def _load_part(self, row: int, samples: Index, keep: bool) -> "_LargePart":
        index = torch.as_tensor(samples, device=self.device)
        return _LargePart(row, index, self._inputs(index, keep), self.federation.y[index])

    def _load_block(self, rows: list[int], samples: list[Index], keep: bool) -> "_PaddedBlock":
        # NumPy pads, so that the number of PyTorch operations does not grow with the clients.
        padded = np.zeros((len(rows), max(len(samples[row]) for row in rows)), dtype=np.int64)
        is_real = np.zeros(padded.shape, dtype=np.bool_)
        for i, row in enumerate(rows):
            padded[i, : len(samples[row])] = samples[row]
            is_real[i, : len(samples[row])] = True
        index, real = (torch.as_tensor(values, device=self.device) for values in (padded, is_real))
        members = torch.tensor(rows, device=self.device)
        return _PaddedBlock(members, index, self._inputs(index, keep), self.federation.y[index], real)

    def _inputs(self, index: Tensor, keep: bool) -> Tensor | None:
        """Gather model inputs that stay in memory; None if they are gathered in each evaluation."""
        return self.federation.features(index, self.dtype) if keep else None


class _LargePart(NamedTuple):
    """The samples (m,) of one model, their labels, and their inputs (m, ...) if cached; `row` is the model's row."""

    row: int
    samples: Tensor
    x: Tensor | None
    y: Tensor


class _PaddedBlock(NamedTuple):
    """Samples (C, m) of C models, padded to the longest; `rows` are the models' rows, `real` is false on padding."""

    rows: Tensor
    samples: Tensor
    x: Tensor | None
    y: Tensor
    real: Tensor


class _EvalSamples(NamedTuple):
    """All evaluation samples of clients `ids`: large parts alone, small parts in blocks."""

    ids: list[int]
    large_parts: list[_LargePart]
    together: list[_PaddedBlock]


def _group_by_size(sizes: list[int], most: int) -> list[list[int]]:
    """Group clients of similar size into blocks of at most `most` padded samples; padding at most doubles the work."""
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
