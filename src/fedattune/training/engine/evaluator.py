"""Evaluate one model per client: small parts as padded blocks of several clients, large parts alone."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...core.hardware import balance, count_parallel_groups, run_parallel, use_threads
from ...core.measured import choose
from ...core.params import Params
from ...core.task import Task
from ...data import Federation
from ...data.types import Index
from .base import EvalPart, Scores, keeps_inputs, score_samples
from .kernels import FastPrediction

EVAL_CHUNK_BYTES = 1 << 28
"""Working memory of one block."""


LARGE_PART_WORK = 1 << 23
"""Samples times parameters from which a client's part is evaluated alone: to call a model takes as long as these
products."""


PADDING_WORK = 1 << 21
"""Padded samples times parameters that take as long as the calls of one more block."""


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
        self._cache: dict[Sequence[EvalPart], _EvalSamples] = {}

    def evaluate(
        self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor
    ) -> list[Scores]:
        """Evaluate models (E, ...) of clients `ids` (E,), each on its own parts."""
        samples = self._gather(tuple(parts), ids.tolist())
        scores = Scores.zeros(samples.sizes)
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
        if samples.together:
            self._evaluate_together(params, buffers, samples.together, scores)
        return scores.split(len(ids))

    def _evaluate_part(
        self, task: Task, group: list["_LargePart"], params: Params, buffers: Params, scores: Scores
    ) -> None:
        """Evaluate models one after the other."""
        for row, client, samples, x, y in group:
            model, state = params.rows(client), buffers.rows(client)
            for at in range(0, len(y), self._at_once):
                part = slice(at, at + self._at_once)
                inputs = self.federation.features(samples[part], self.dtype) if x is None else x[part]
                with FastPrediction():
                    correct, losses = score_samples(task.predict(model, state, inputs), y[part])
                scores.correct[row] += correct.sum()
                scores.loss[row] += losses.sum().double()

    def _evaluate_together(
        self, params: Params, buffers: Params, blocks: list["_PaddedBlock"], scores: Scores
    ) -> None:
        """Evaluate blocks by one thread or by all; with small blocks, threads wait longer than they work."""

        def run(threads: int) -> None:
            with use_threads(threads):
                self._evaluate_blocks(params, buffers, blocks, scores)

        n_threads = count_parallel_groups(self.device)
        one, every = "one thread", "all threads"
        calls = {one: partial(run, 1), every: partial(run, n_threads)}
        work = (sum(block.samples.numel() for block in blocks), self._tasks[0].params.numel())
        calls[choose("evaluation", work, calls) if n_threads > 1 else one]()

    def _evaluate_blocks(
        self, params: Params, buffers: Params, blocks: list["_PaddedBlock"], scores: Scores
    ) -> None:
        """Evaluate clients with small parts: clients with similar numbers of samples form one batch of models."""
        predict = vmap(self._tasks[0].predict, randomness="different")
        for block in blocks:
            x = self.federation.features(block.samples, self.dtype) if block.x is None else block.x
            logits = predict(params.rows(block.clients), buffers.rows(block.clients), x)
            correct, losses = score_samples(logits, block.y)
            scores.loss[block.rows] = losses.masked_fill(~block.real, 0).sum(1).double()
            scores.correct[block.rows] = (correct & block.real).sum(1)

    def _gather(self, parts: tuple[EvalPart, ...], ids: list[int]) -> "_EvalSamples":
        """Gather the samples of clients `ids`; keep them until other clients are evaluated."""
        cached = self._cache.get(parts)
        if cached is None or cached.ids != ids:
            all_parts = [self.federation.part(part) for part in parts]
            samples = [part[i] for part in all_parts for i in ids]
            sizes, values = [len(some) for some in samples], max(1, math.prod(self.federation.input_shape))
            keep = keeps_inputs(self.federation, sum(sizes), self.dtype)
            n_params = self._tasks[0].params.numel()
            large = [self.is_serial or size * n_params >= LARGE_PART_WORK for size in sizes]
            large_parts = [
                self._load_part(row, row % len(ids), samples[row], keep)
                for row, size in enumerate(sizes)
                if large[row] and size
            ]
            small = [0 if large[row] else size for row, size in enumerate(sizes)]
            most = max(1, EVAL_CHUNK_BYTES // (8 * values * self.dtype.itemsize))
            most = self._tasks[0].limit_samples(most, values)
            blocks = _group_by_size(small, most, PADDING_WORK // n_params)
            together = [self._load_block(rows, len(ids), samples, keep) for rows in blocks]
            total = torch.tensor(sizes, device=self.device)
            cached = self._cache[parts] = _EvalSamples(ids, total, large_parts, together)
        return cached

    def _load_part(self, row: int, client: int, samples: Index, keep: bool) -> "_LargePart":
        index = torch.as_tensor(samples, device=self.device)
        return _LargePart(row, client, index, self._inputs(index, keep), self.federation.y[index])

    def _load_block(
        self, rows: list[int], n_clients: int, samples: list[Index], keep: bool
    ) -> "_PaddedBlock":
        # NumPy pads, so that the number of PyTorch operations does not grow with the clients.
        padded = np.zeros((len(rows), max(len(samples[row]) for row in rows)), dtype=np.int64)
        is_real = np.zeros(padded.shape, dtype=np.bool_)
        for i, row in enumerate(rows):
            padded[i, : len(samples[row])] = samples[row]
            is_real[i, : len(samples[row])] = True
        index, real = (torch.as_tensor(values, device=self.device) for values in (padded, is_real))
        where = torch.tensor(rows, device=self.device)
        y = self.federation.y[index]
        return _PaddedBlock(where, where % n_clients, index, self._inputs(index, keep), y, real)

    def _inputs(self, index: Tensor, keep: bool) -> Tensor | None:
        """Gather model inputs that stay in memory; None if they are gathered in each evaluation."""
        return self.federation.features(index, self.dtype) if keep else None


class _LargePart(NamedTuple):
    """The samples (m,) of one model, their labels, and their inputs (m, ...) if cached.

    `row` is the row of the scores, `client` the row of the models.
    """

    row: int
    client: int
    samples: Tensor
    x: Tensor | None
    y: Tensor


class _PaddedBlock(NamedTuple):
    """Samples (C, m) of C models, padded to the longest; `real` is false on padding.

    `rows` are rows of the scores, `clients` are rows of the models.
    """

    rows: Tensor
    clients: Tensor
    samples: Tensor
    x: Tensor | None
    y: Tensor
    real: Tensor


class _EvalSamples(NamedTuple):
    """All evaluation samples of clients `ids`: large parts alone, small parts in blocks.

    There is one row of scores per part and client, clients change fastest; `sizes` are their samples.
    """

    ids: list[int]
    sizes: Tensor
    large_parts: list[_LargePart]
    together: list[_PaddedBlock]


def _group_by_size(sizes: list[int], most: int, most_padding: int) -> list[list[int]]:
    """Group clients of similar size into blocks of at most `most` samples, of which `most_padding` are padding."""
    blocks: list[list[int]] = []
    longest = padding = 0
    for client in sorted(range(len(sizes)), key=lambda c: -sizes[c]):
        if not sizes[client]:
            break
        padding += longest - sizes[client]
        if blocks and padding <= most_padding and (len(blocks[-1]) + 1) * longest <= most:
            blocks[-1].append(client)
        else:
            blocks.append([client])
            longest, padding = sizes[client], 0
    return blocks
