"""Evaluate one model per client: small parts as padded blocks of several clients, large parts alone."""

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from ..core.hardware import balance, count_parallel_groups, run_parallel, use_threads
from ..core.measured import choose, compare
from ..core.params import Params
from ..core.task import Task
from ..data import Federation
from ..data.types import Index
from .base import EvalPart, Scores, keeps_inputs, score_block, score_samples
from .compiler import Compiler
from .kernels import replace_slow_calls

EVAL_CHUNK_BYTES = 1 << 28
"""Working memory of one block."""

CALL_WORK = 1 << 21
"""Samples times parameters that take as long as one more call of a model, where this may not be measured."""

MIN_LARGE_CALLS = 2
"""Calls whose time a client's part must take to be evaluated alone: one call costs half of it at most."""

PLAIN_BATCH = 1000
"""Samples of a plain call: so many activations stay in the caches of one core."""

MAX_COMPILED_BLOCKS = 16
"""Blocks whose predictions are compiled; of more, the compiler would forget some before they are evaluated again."""

MAX_MEASURED_WORK = 1 << 34
"""Samples times parameters of an evaluation that is measured in several ways, which takes a second at most."""

MEASURED_SAMPLES = 16
"""Samples of the smaller of two calls whose difference gives the time of a sample."""

ALONE, PLAIN, BLOCKS = "large parts alone", "large parts in small batches", "blocks"

_Way = tuple[list[int], list[list[int]]]
"""Rows of scores that are evaluated alone, and groups of rows that form blocks."""


class Evaluator:
    """Evaluate one model per client; `is_serial` runs every model without a client axis, also for small parts."""

    def __init__(
        self, task: Task, federation: Federation, dtype: torch.dtype, compiler: Compiler, *, is_serial: bool = False
    ) -> None:
        self.federation, self.dtype, self.is_serial = federation, dtype, is_serial
        self.device = federation.y.device
        self._tasks, self._cores = [task], count_parallel_groups(self.device)
        values = max(1, math.prod(federation.input_shape))
        self._at_once = task.limit_samples(max(64, min(4096, EVAL_CHUNK_BYTES // (64 * values))), values)
        self._cache: dict[Sequence[EvalPart], _EvalSamples] = {}
        self._compiler = compiler

    def evaluate(self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        samples = self._gather(tuple(parts), ids.tolist(), params, buffers)
        return self._evaluate_samples(params, buffers, samples).split(len(ids))

    def _evaluate_samples(self, params: Params, buffers: Params, samples: "_EvalSamples") -> Scores:
        scores = Scores.zeros(samples.sizes, self.federation.kind)
        self._evaluate_alone(params, buffers, samples, scores)
        # All clients come again, cohorts seldom. A resumed run compiles what the whole run compiled.
        is_all = len(samples.ids) == self.federation.n_clients
        should_compile = is_all and len(samples.blocks) <= MAX_COMPILED_BLOCKS
        with use_threads(samples.threads):
            self._evaluate_blocks(params, buffers, samples.blocks, scores, should_compile)
        return scores

    def _evaluate_alone(self, params: Params, buffers: Params, samples: "_EvalSamples", scores: Scores) -> None:
        """Evaluate large parts one by one, each core some of them."""
        parts = samples.large_parts
        if parts:
            # A module holds the weights of one call at a time, so each core needs its own.
            self._tasks += [self._tasks[0].twin() for _ in range(self._cores - len(self._tasks))]

        def evaluate(task: Task, group: list[int]) -> None:
            for part in (parts[i] for i in group):
                model, state = params.rows(part.client), buffers.rows(part.client)
                task.call_with(model, state, partial(self._score_part, part, scores, samples.is_plain))

        groups = balance([len(one.y) for one in parts], len(self._tasks))
        tasks = zip(self._tasks, groups, strict=True)
        run_parallel([partial(evaluate, task, group) for task, group in tasks if group])

    def _score_part(self, part: "_LargePart", scores: Scores, is_plain: bool, model: nn.Module) -> None:
        for at in range(0, len(part.y), self._at_once):
            some = slice(at, at + self._at_once)
            x = self.federation.features(part.samples[some], self.dtype) if part.x is None else part.x[some]
            if is_plain:  # to replace the calls of so few samples takes longer than it saves
                outputs = torch.cat([model(few) for few in torch.split(x, PLAIN_BATCH)])
            else:
                with replace_slow_calls(self.device):
                    outputs = model(x)
            correct, losses = score_samples(outputs, part.y[some], self.federation.kind)
            scores.correct[part.row] += correct.sum()
            scores.loss[part.row] += losses.sum().double()

    def _evaluate_blocks(
        self,
        params: Params,
        buffers: Params,
        blocks: list["_PaddedBlock"],
        scores: Scores,
        should_compile: bool = False,
    ) -> None:
        names, states = [*params], [*buffers]

        def predict(x: Tensor, *tensors: Tensor) -> Tensor:
            model = Params(dict(zip(names, tensors, strict=False)))
            own = Params(dict(zip(states, tensors[len(names) :], strict=True)))
            each: Callable[..., Tensor] = vmap(self._tasks[0].predict, randomness="different")
            return each(model, own, x)

        for block in blocks:
            x = self.federation.features(block.samples, self.dtype) if block.x is None else block.x
            tensors = [x, *(v[block.clients] for v in (*params.values(), *buffers.values()))]
            if should_compile:
                (logits,), _ = self._compiler.call(("predict", *names, *states), predict, tensors)
            else:
                logits = predict(*tensors)
            correct, losses = score_block(logits, block.y, self.federation.kind)
            scores.loss[block.rows] = losses.masked_fill(~block.real, 0).sum(1).double()
            scores.correct[block.rows] = correct.masked_fill(~block.real, 0).sum(1)

    def _gather(self, parts: tuple[EvalPart, ...], ids: list[int], params: Params, buffers: Params) -> "_EvalSamples":
        """Gather the samples of clients `ids` as it is fastest; keep them until other clients are evaluated."""
        cached = self._cache.get(parts)
        if cached is None or cached.ids != ids:
            self._cache.pop(parts, None)
            all_parts = [self.federation.part(part) for part in parts]
            samples = [part[i] for part in all_parts for i in ids]
            sizes = [len(some) for some in samples]
            ways, threads = self._plan(sizes)
            gather = cache(lambda way: self._load(ids, samples, *ways[way]))

            def load(way: str, threads: int, *, is_plain: bool = False) -> _EvalSamples:
                return gather(way)._replace(threads=threads, is_plain=is_plain)

            plans = {
                f"{way}, {text}": partial(load, way, n)
                for way, (_, blocks) in ways.items()
                for n, text in threads.items()
                if blocks or n == self._cores
            }
            if BLOCKS in ways and self._at_once > PLAIN_BATCH:
                alone = {name: plan for name, plan in plans.items() if name.startswith(ALONE)}
                plans |= {name.replace(ALONE, PLAIN): partial(plan, is_plain=True) for name, plan in alone.items()}
            calls = {
                name: lambda plan=plan: self._evaluate_samples(params, buffers, plan()) for name, plan in plans.items()
            }
            work = (len(samples), sum(sizes), self._tasks[0].params.numel())
            cached = plans[
                choose(f"evaluation {len(calls)} ways", work, calls, min_gain=1.0)
                if len(plans) > 1
                else next(iter(plans))
            ]()
            self._cache[parts] = cached
        return cached

    def _plan(self, sizes: list[int]) -> tuple[dict[str, "_Way"], dict[int, str]]:
        """Plan ways to evaluate parts of so many samples, and threads of PyTorch; several have to be measured."""
        all_threads = {self._cores: "all threads"}
        if self.is_serial:
            return {"single models": ([row for row, size in enumerate(sizes) if size], [])}, all_threads
        values, task = max(1, math.prod(self.federation.input_shape)), self._tasks[0]
        max_samples = max(1, EVAL_CHUNK_BYTES // (8 * values * self.dtype.itemsize))
        max_samples = task.limit_samples(max_samples, values)
        call = self._samples_per_call
        large = [row for row, size in enumerate(sizes) if size > MIN_LARGE_CALLS * call]
        alone = set(large)
        small = [0 if row in alone else size for row, size in enumerate(sizes)]
        ways: dict[str, _Way] = {ALONE: (large, _group_by_size(small, max_samples, call))}
        if sum(sizes) * task.params.numel() > MAX_MEASURED_WORK or self.device.type != "cpu":
            return ways, all_threads
        if large:
            ways[BLOCKS] = ([], _group_by_size(sizes, max_samples, call))
        return ways, {1: "one thread", **all_threads}

    def _load(self, ids: list[int], samples: list[Index], large: list[int], blocks: list[list[int]]) -> "_EvalSamples":
        sizes = torch.tensor([len(some) for some in samples], device=self.device)
        # Inputs that the model writes over are gathered anew.
        keep = keeps_inputs(self.federation, int(sizes.sum()), self.dtype) and not self._tasks[0].writes_inputs
        large_parts = [self._load_part(row, row % len(ids), samples[row], keep) for row in large]
        loaded = [self._load_block(rows, len(ids), samples, keep) for rows in blocks]
        return _EvalSamples(ids, sizes, large_parts, loaded, self._cores, is_plain=False)

    @cached_property
    def _samples_per_call(self) -> int:
        """Samples of a model that take as long as one more call, measured with one thread on this machine."""
        task, few, many = self._tasks[0], MEASURED_SAMPLES, min(self._at_once, 32 * MEASURED_SAMPLES)
        seconds: dict[str, float] = {}
        if self.device.type == "cpu":  # a GPU returns from a call before it is done
            params, buffers = task.params.repeat(1), task.buffers.repeat(1)
            calls = {}
            for size in (few, many):
                block = self._load_block([0], 1, [np.zeros(size, dtype=np.int64)], True)
                scores = Scores.zeros(torch.zeros(1, dtype=torch.int64), self.federation.kind)
                calls[f"{size} samples"] = partial(self._evaluate_blocks, params, buffers, [block], scores)
            with use_threads(1):
                seconds = compare("call", (task.params.numel(),), calls)
        if not seconds:
            return CALL_WORK // task.params.numel()
        of_few, of_many = seconds.values()
        per_sample = max(1e-9, (of_many - of_few) / (many - few))
        return max(0, round(of_few / per_sample) - few)

    def _load_part(self, row: int, client: int, samples: Index, keep: bool) -> "_LargePart":
        index = torch.as_tensor(samples, device=self.device)
        return _LargePart(row, client, index, self._inputs(index, keep), self.federation.y[index])

    def _load_block(self, rows: list[int], n_clients: int, samples: list[Index], keep: bool) -> "_PaddedBlock":
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
        return self.federation.features(index, self.dtype) if keep else None


class _LargePart(NamedTuple):
    """The samples (m,) of one model: row of the scores, row of the models, numbers, inputs if kept, and labels."""

    row: int
    client: int
    samples: Tensor
    x: Tensor | None
    y: Tensor


class _PaddedBlock(NamedTuple):
    """Samples (C, m) of C models, padded to the longest; rows of the scores and of the models."""

    rows: Tensor
    clients: Tensor
    samples: Tensor
    x: Tensor | None
    y: Tensor
    real: Tensor


class _EvalSamples(NamedTuple):
    """All evaluation samples of clients `ids`: large parts alone, small parts in blocks.

    There is one row of scores per part and client, clients change fastest; `sizes` are their samples. Blocks have so
    many threads: with small blocks, threads wait longer than they work. If `is_plain`, large parts are evaluated as in
    a plain loop: few samples by each call of the model.
    """

    ids: list[int]
    sizes: Tensor
    large_parts: list[_LargePart]
    blocks: list[_PaddedBlock]
    threads: int
    is_plain: bool


def _group_by_size(sizes: list[int], max_samples: int, max_padding: int) -> list[list[int]]:
    """Group clients of similar size into blocks of at most `max_samples`, of which `max_padding` are padding."""
    blocks: list[list[int]] = []
    longest = padding = 0
    for client in sorted(range(len(sizes)), key=lambda c: -sizes[c]):
        if not sizes[client]:
            break
        padding += longest - sizes[client]
        if blocks and padding <= max_padding and (len(blocks[-1]) + 1) * longest <= max_samples:
            blocks[-1].append(client)
        else:
            blocks.append([client])
            longest, padding = sizes[client], 0
    return blocks
