"""Run all clients of a chunk as one batch of models."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..core.algorithm import ClientUpdate, Probing
from ..core.hardware import count_parallel_groups, keep_freed_memory, run_parallel, seed_rng, use_threads
from ..core.measured import choose_threads
from ..core.params import Params, copy_dense
from ..core.payload import Batch, LocalState, Payload
from ..core.task import Task
from ..data import Federation
from ..data.types import Index
from ..privacy.dp_sgd import ClientNoise
from .base import ClientInputs, ClientOutputs, Engine, EvalPart, Scores, TaskLoss
from .batches import LocalTraining
from .compiler import Compiler
from .evaluator import Evaluator
from .runner import BatchedRunner, SerialRunner, pack_lanes

ENGINE_CHUNK_BYTES = 1 << 30
"""Working memory of one chunk of clients."""


class VectorizedEngine(Engine):
    """Run clients together, in chunks that fit into memory; compile each step once and replay it.

    `is_serial` runs the models without a client axis, one client after the other on every core.
    """

    def __init__(
        self, task: Task, federation: Federation, *, is_serial: bool = False, should_compile: bool = True
    ) -> None:
        super().__init__(task, federation)
        self.is_serial = is_serial
        self._compiler = Compiler(should_compile, task.model)
        # Batches of models with batch statistics are not padded: their probes have too many widths to be compiled.
        self._probe_compiler = Compiler(False) if task.has_batch_statistics else self._compiler
        self._cores, self._undivided = count_parallel_groups(self.device), set[Hashable]()
        self._evaluator = Evaluator(task, federation, self.dtype, self._compiler, is_serial=is_serial)
        if self.device.type == "cpu":
            keep_freed_memory()

    def take_rows(self, federation: Federation) -> Engine:
        return VectorizedEngine(
            self.task, federation, is_serial=self.is_serial, should_compile=self._compiler.should_compile
        )

    def _train(self, rule: ClientUpdate, ids: Tensor, inputs: ClientInputs, training: LocalTraining) -> ClientOutputs:
        parts, held_out = self.federation.part(training.part), self.federation.part("validation")
        local_states = ({k: v.rows(row) for k, v in inputs.local_state.items()} for row in range(len(ids)))
        todo = [
            training.choose_batches(rule, client, parts[client], held_out[client], local_state)
            for client, local_state in zip(ids.tolist(), local_states, strict=True)
        ]
        batches, probed = [b for b, _ in todo], [p for _, p in todo if p is not None]
        if not self.task.has_batch_statistics:
            probed = _pad_alike(probed)
        n_values = self.task.params.numel()
        made = (training.make_noise(client, len(parts[client]), n_values) for client in ids.tolist())
        noises = [noise for noise in made if noise is not None]
        results: list[ClientOutputs] = []
        order: list[int] = []
        # PyTorch's own threads would spin, waiting for work, on cores that groups of clients need.
        with seed_rng(training.rng_seed(), self.device), torch.no_grad(), use_threads(1):
            for chunk in self._chunks(batches, probed, inputs, has_noise=bool(noises)):
                order += chunk
                chunk_batches = [batches[i] for i in chunk]
                chunk_probed = [probed[i] for i in chunk] if probed else []
                chunk_noises = [noises[i] for i in chunk] if noises else []
                is_all = chunk == list(range(len(batches)))
                chunk_inputs = inputs if is_all else inputs.rows(torch.tensor(chunk, device=self.device))
                work = chunk_batches, chunk_probed, chunk_noises
                results.append(self._train_chunk(rule, *work, chunk_inputs, training))
        if len(results) == 1 and order == sorted(order):
            return results[0]
        outputs: ClientOutputs = tree_map(lambda *chunks: torch.cat(chunks), *results)
        return outputs.rows(torch.tensor(np.argsort(order), device=self.device))

    def _chunks(
        self, batches: list[Index], probed: list[Index], inputs: ClientInputs, *, has_noise: bool
    ) -> Iterator[list[int]]:
        """Cut the clients into chunks that fit into memory, clients with the most steps first."""
        n_values = sum(v.numel() for v in tree_leaves((inputs.sent, inputs.local_state)))
        values = self.task.params.numel() * 6 + n_values // len(batches) * 2
        values += (
            math.prod(self.federation.input_shape)
            * max(math.prod(b.shape[1:]) for b in [*batches, *probed])
            * max(8, self.task.activations_per_value)
        )
        if has_noise:  # gradients of single samples, and their copies
            largest = max(b.shape[2] for b in batches)
            values += 3 * self.task.params.numel() * min(largest, self.task.samples_at_once)
        per_chunk = max(1, ENGINE_CHUNK_BYTES // (values * self.dtype.itemsize))

        # Padding would change batch statistics, so models with these get batches of one size per chunk.
        split = [b for b in (batches, probed) if b and self.task.has_batch_statistics]

        def sizes(i: int) -> tuple[int, ...]:
            return tuple(b[i].shape[2] for b in split)

        for _, group in groupby(sorted(range(len(batches)), key=sizes, reverse=True), key=sizes):
            members = sorted(group, key=lambda i: -len(batches[i]))
            if len(members) <= per_chunk:
                members.sort()  # in the original order nothing has to be moved
            for start in range(0, len(members), per_chunk):
                yield members[start : start + per_chunk]

    def _train_chunk(
        self,
        rule: ClientUpdate,
        batches: list[Index],
        probed: list[Index],
        noises: list[ClientNoise],
        inputs: ClientInputs,
        training: LocalTraining,
    ) -> ClientOutputs:
        n_steps = torch.tensor([float(len(b)) for b in batches], dtype=self.dtype, device=self.device)
        round_ = training.round_tensor(n_steps)
        clients = (n_steps, inputs.is_uploaded)
        start, start_spec = tree_flatten((inputs.sent, inputs.local_state, inputs.fresh))
        key = training.compiler_key(rule)

        def begin(round_: Tensor, n: Tensor, u: Tensor, *start: Tensor) -> Any:
            def one(n: Tensor, u: Tensor, s: Payload, m: LocalState, f: Tensor) -> Any:
                return rule.begin(s, m, f, training.make_round_context(n, u, round_))

            return vmap(one)(n, u, *tree_unflatten(start, start_spec))

        carries, carry_spec = self._compiler.call((*key, "begin", repr(start_spec)), begin, [round_, *clients, *start])

        buffers, buffer_spec = tree_flatten(inputs.buffers)
        n_carries = len(carries)  # kept functions must not hold the carries themselves

        def probe_client(round_: Tensor, n: Tensor, u: Tensor, carry: Any, own: Params, batch: Batch) -> Any:
            assert isinstance(rule, Probing)
            grad = partial(self._gradient([own], training), statistics=False)
            loss, context = TaskLoss(self.task, [own]), training.make_round_context(n, u, round_)
            return rule.probe(carry, batch, grad, loss, context), own

        def step_client(round_: Tensor, n: Tensor, u: Tensor, carry: Any, own: Params, batch: Batch) -> Any:
            buffer_cell = [own]
            noise = None
            if training.privacy is not None:
                batch, noise = batch[:-1], batch[-1]
            gradient = self._gradient(buffer_cell, training, noise)
            new = rule.step(carry, batch, gradient, training.make_round_context(n, u, round_))
            return new, buffer_cell[0]

        def make_step(client: Callable[..., Any]) -> Callable[..., list[Tensor]]:
            def step(fixed: Sequence[Tensor], leaves: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
                n, u, *rest = leaves
                carry = tree_unflatten(rest[:n_carries], carry_spec)
                own = tree_unflatten(rest[n_carries:], buffer_spec)
                one = partial(client, fixed[0])
                each: Any = one if self.is_serial else vmap(one, randomness="different")
                new, changed = each(n, u, carry, own, tuple(batch))
                return [n, u, *tree_leaves(_reorder_like(new, carry)), *tree_leaves(_reorder_like(changed, own))]

            return step

        specs = repr((carry_spec, buffer_spec))
        leaves = [*clients, *carries, *buffers]
        for client, compiler, todo, noise in (
            (probe_client, self._probe_compiler, probed, []),
            (step_client, self._compiler, batches, noises),
        ):
            if any(len(b) for b in todo):
                kind = (*key, specs, client.__name__)
                leaves = self._steps(compiler, make_step(client), kind, [round_], leaves, todo, noise)
        carries, buffers = leaves[2 : 2 + n_carries], leaves[2 + n_carries :]

        def finish(round_: Tensor, n: Tensor, u: Tensor, *tensors: Tensor) -> Any:
            def one(n: Tensor, u: Tensor, carry: Any, s: Payload, m: LocalState) -> Any:
                return rule.finish(carry, s, m, training.make_round_context(n, u, round_))

            sent, local_state, _ = tree_unflatten(tensors[n_carries:], start_spec)
            return vmap(one)(n, u, tree_unflatten(tensors[:n_carries], carry_spec), sent, local_state)

        ends, end_spec = self._compiler.call(
            (*key, "finish", repr((carry_spec, start_spec))), finish, [round_, *clients, *carries, *start]
        )
        upload, new_state = tree_unflatten(ends, end_spec)
        return ClientOutputs(upload, new_state, tree_unflatten(buffers, buffer_spec), n_steps)

    def _steps(
        self,
        compiler: Compiler,
        function: Callable[..., list[Tensor]],
        key: tuple[Any, ...],
        fixed: list[Tensor],
        leaves: list[Tensor],
        batches: list[Index],
        noises: list[ClientNoise],
    ) -> list[Tensor]:
        """Run all local steps of clients with carries and buffers `leaves` (C, ...)."""
        maker = partial(compiler.step, key, function, fixed)
        for at_once in (1,) if key in self._undivided else (self._cores, 1):
            groups = self._groups(at_once, batches, fixed, leaves, noises)
            steps = [step for group in groups for step in group.prepare(maker)]
            # Groups that draw random numbers at the same time would not repeat. Small operations called from Python
            # would wait for the interpreter's lock.
            is_random = any(step.is_random for step in steps)
            if at_once == 1 or (not is_random and (self.is_serial or all(step.is_scripted for step in steps))):
                break
            self._undivided.add(key)
        moving = {i for step in steps for i in step.moving}
        out = [copy_dense(leaf) if i in moving else leaf for i, leaf in enumerate(leaves)]
        with use_threads(self._count_threads(groups)):
            run_parallel([partial(group.run, leaves, out) for group in groups])
        return out

    def _count_threads(self, groups: Sequence[BatchedRunner | SerialRunner]) -> int:
        group = groups[0]
        if self._cores == 1 or len(groups) > 1 or not isinstance(group, BatchedRunner):
            return self._cores
        return choose_threads("step", group.sizes, group.try_steps, self._cores)

    def _groups(
        self, at_once: int, batches: list[Index], fixed: list[Tensor], leaves: list[Tensor], noises: list[ClientNoise]
    ) -> Sequence[BatchedRunner | SerialRunner]:
        counts = [len(b) for b in batches]
        if not self.is_serial:
            return [
                BatchedRunner(lanes, batches, fixed, leaves, self.federation, self.dtype, noises)
                for lanes in pack_lanes(counts, at_once)
            ]
        clients = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
        lines = [clients[i::at_once] for i in range(min(at_once, len(clients)))]
        return [SerialRunner(line, batches, fixed, leaves, self.federation, self.dtype, noises) for line in lines]

    def evaluate_each(self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        return self._evaluator.evaluate(params, buffers, parts, ids)


def _pad_alike(batches: list[Index]) -> list[Index]:
    """Pad batches to one number of rows, a power of two: every other number would be compiled anew."""
    size = 1 << (max((b.shape[2] for b in batches), default=1) - 1).bit_length()
    return [np.pad(b, ((0, 0), (0, 0), (0, size - b.shape[2])), constant_values=-1) for b in batches]


def _reorder_like(new: Any, old: Any) -> Any:
    """Order the dictionary entries of the nest `new` as in `old`."""
    if isinstance(old, Mapping):
        return type(old)({k: _reorder_like(new[k], v) for k, v in old.items()})  # type: ignore[call-arg]
    if isinstance(old, tuple) and hasattr(old, "_fields"):
        return type(old)(*(_reorder_like(a, b) for a, b in zip(new, old, strict=True)))
    if isinstance(old, tuple | list):
        return type(old)(_reorder_like(a, b) for a, b in zip(new, old, strict=True))
    return new
