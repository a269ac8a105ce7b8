"""Many clients as one batch of models: every tensor gets a client axis, and `torch.func.vmap` runs over it."""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from ..core import Batch, ClientUpdate
from ..data import Federation
from ..params import Params, concatenate
from ..task import Task
from .base import Engine, Inputs, Scores, Trained, join, take
from .work import Work

CHUNK_BYTES = 1 << 30
"""Working memory that one chunk of clients may take."""

CACHE_BYTES = 1 << 30
"""Evaluation inputs that may stay in memory between rounds."""


class Batched(Engine):
    """Runs clients together, in chunks that fit into memory."""

    def __init__(self, task: Task, federation: Federation) -> None:
        super().__init__(task, federation)
        self._evaluation: dict[str, list[_Padded]] = {}
        if self.device.type == "cpu":
            _keep_freed_memory()

    def train(self, rule: ClientUpdate, ids: Tensor, inputs: Inputs, work: Work) -> Trained:
        """Train chunk by chunk, clients with the most work first."""
        parts = self.federation.part(work.part)
        todo = [
            work.of(rule, client, parts[client], take(inputs.memory, row))
            for row, client in enumerate(ids.tolist())
        ]
        batches, probed = [b for b, _ in todo], [p for _, p in todo if p is not None]
        order = sorted(
            range(len(batches)), key=lambda i: (batches[i].shape[2], len(batches[i])), reverse=True
        )
        results: list[Trained] = []
        done: list[int] = []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(work.noise_seed())
            for chunk in self._chunks(order, batches, probed, inputs):
                rows = torch.tensor(chunk, device=self.device)
                done += chunk
                mine, before = [batches[i] for i in chunk], [probed[i] for i in chunk] if probed else []
                results.append(self._train_chunk(rule, mine, before, inputs.rows(rows), work))
        back = torch.tensor(np.argsort(done), device=self.device)
        return join(results, concatenate).rows(back)

    def _chunks(
        self,
        order: list[int],
        batches: list[NDArray[np.int64]],
        probed: list[NDArray[np.int64]],
        inputs: Inputs,
    ) -> Iterator[list[int]]:
        """Cut the ordered clients so that a chunk fits into memory."""
        held = sum(
            p.numel() for p in (inputs.sent.params, *inputs.sent.extra.values(), *inputs.memory.values())
        )
        values = self.task.params.numel() * 6 + held // len(order) * 2
        values += int(np.prod(self.federation.input_shape)) * int(np.prod(batches[order[0]].shape[1:])) * 8
        per_chunk = max(1, CHUNK_BYTES // (values * self.dtype.itemsize))

        # Padding would enter the batch statistics, so models that use them get batches of one size per chunk.
        def sizes(i: int) -> tuple[int, ...]:
            alike = self.task.uses_batch_statistics
            return tuple(b[i].shape[2] for b in (batches, probed) if b) if alike else ()

        for _, group in groupby(sorted(order, key=sizes, reverse=True), key=sizes):
            members = sorted(group, key=lambda i: -len(batches[i]))
            for start in range(0, len(members), per_chunk):
                yield members[start : start + per_chunk]

    def _train_chunk(
        self,
        rule: ClientUpdate,
        batches: list[NDArray[np.int64]],
        probed: list[NDArray[np.int64]],
        inputs: Inputs,
        work: Work,
    ) -> Trained:
        """Train clients whose numbers of steps fall along the chunk."""
        sent, memory, buffers, fresh, heard = inputs
        counts = [len(b) for b in batches]
        index, padded = self._index(batches)
        n_steps = torch.tensor(counts, dtype=self.dtype, device=self.device)

        def one_step(n: Tensor, h: Tensor, carry: Any, own: Params, batch: Batch) -> tuple[Any, Params]:
            box = [own]
            return rule.step(carry, batch, self._gradient(box, work), work.job(n, h)), box[0]

        step = vmap(one_step, randomness="different")
        carry = vmap(lambda s, m, f, n, h: rule.begin(s, m, f, work.job(n, h)))(
            sent, memory, fresh, n_steps, heard
        )
        if probed:
            carry = self._probe(rule, probed, carry, buffers, n_steps, heard, work)
        finished = []
        active = len(counts)
        for t in range(counts[0]):
            if counts[active - 1] == t:  # the last clients are done: go on with the others
                still = sum(count > t for count in counts)
                finished.append(tree_map(lambda a, s=still, e=active: a[s:e], (carry, buffers)))
                carry, buffers = tree_map(lambda a, s=still: a[:s], (carry, buffers))
                active = still
            carry, buffers = step(
                n_steps[:active], heard[:active], carry, buffers, self._batch(index[:active, t], padded)
            )
        for rest in reversed(finished):
            carry, buffers = tree_map(lambda a, b: torch.cat([a, b]), (carry, buffers), rest)
        upload, memory = vmap(lambda c, s, m, n, h: rule.finish(c, s, m, work.job(n, h)))(
            carry, sent, memory, n_steps, heard
        )
        return Trained(upload, memory, buffers, n_steps)

    def _index(self, batches: list[NDArray[np.int64]]) -> tuple[Tensor, bool]:
        """Sample numbers (C, steps, B) or (C, steps, per step, B), -1 where there are none, and if there are such."""
        per_step = batches[0].shape[1]
        shape = (len(batches), max(len(b) for b in batches), per_step, max(b.shape[2] for b in batches))
        filled = np.full(shape, -1, dtype=np.int64)
        for row, b in zip(filled, batches, strict=True):
            row[: len(b), :, : b.shape[2]] = b
        padded = any((b < 0).any() or b.shape[2] < shape[3] for b in batches)
        index = torch.as_tensor(filled, device=self.device)
        return index.squeeze(2) if per_step == 1 else index, bool(padded)

    def _probe(
        self,
        rule: ClientUpdate,
        probed: list[NDArray[np.int64]],
        carry: Any,
        buffers: Params,
        n_steps: Tensor,
        heard: Tensor,
        work: Work,
    ) -> Any:
        """Probe batch by batch; clients that have no more keep what they have."""
        counts = torch.tensor([len(b) for b in probed], device=self.device)
        index, padded = self._index(probed)

        def one_look(n: Tensor, h: Tensor, active: Tensor, carry: Any, own: Params, batch: Batch) -> Any:
            grad = partial(self._gradient([own], work), statistics=False)
            new = rule.probe(carry, batch, grad, self._loss([own]), work.job(n, h))
            return tree_map(lambda a, b: a if a is b else torch.where(active, a, b), new, carry)

        look = vmap(one_look, randomness="different")
        for t in range(index.shape[1]):
            active = counts > t
            # Those without a batch look at somebody else's: a batch of nothing but padding would give NaN.
            batch = self._batch(
                torch.where(active[:, None], index[:, t], index[active.nonzero()[0], t]), padded
            )
            carry = look(n_steps, heard, active, carry, buffers, batch)
        return carry

    def evaluate_each(self, params: Params, buffers: Params, part: Literal["validation", "test"]) -> Scores:
        """Evaluate groups of clients with about as many samples together."""
        sizes = self.federation.sizes(part).to(self.device)
        correct = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(sizes), dtype=torch.float64, device=self.device)
        predict = vmap(self.task.predict, randomness="different")
        for chunk in self._padded(part):
            x = self.federation.features(chunk.samples, self.dtype) if chunk.x is None else chunk.x
            logits = predict(params.rows(chunk.clients), buffers.rows(chunk.clients), x)
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), chunk.y.flatten(), reduction="none"
            )
            loss[chunk.clients] = (losses.view_as(chunk.real) * chunk.real).sum(1).double()
            correct[chunk.clients] = ((logits.argmax(2) == chunk.y) & chunk.real).sum(1)
        return Scores(sizes, correct, loss)

    def _padded(self, part: Literal["validation", "test"]) -> list["_Padded"]:
        """The part's samples as padded blocks, kept between rounds if they are small enough."""
        if part not in self._evaluation:
            samples = self.federation.part(part)
            values = int(np.prod(self.federation.input_shape)) * self.dtype.itemsize
            keep = sum(len(s) for s in samples) * values < CACHE_BYTES
            blocks = _blocks([len(s) for s in samples], max(1, CHUNK_BYTES // (8 * values)))
            self._evaluation[part] = [self._pad(clients, samples, keep) for clients in blocks]
        return self._evaluation[part]

    def _pad(self, clients: list[int], samples: list[NDArray[np.int64]], keep: bool) -> "_Padded":
        longest = max(len(samples[c]) for c in clients)
        index = np.zeros((len(clients), longest), dtype=np.int64)
        real = np.zeros(index.shape, dtype=bool)
        for row, mask, client in zip(index, real, clients, strict=True):
            row[: len(samples[client])] = samples[client]
            mask[: len(samples[client])] = True
        where = torch.as_tensor(index, device=self.device)
        return _Padded(
            torch.tensor(clients, device=self.device),
            where,
            self.federation.features(where, self.dtype) if keep else None,
            self.federation.y[where],
            torch.as_tensor(real, device=self.device),
        )


class _Padded(NamedTuple):
    """Samples (C, m) of C clients, padded to the longest; `real` is false on padding."""

    clients: Tensor
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


@cache
def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, once.

    Updates of stacked parameters allocate megabytes at every step; by default glibc returns them to the system
    and faults in fresh pages each time, which cost more than the arithmetic (measured: 3x on a small network).
    """
    if sys.platform != "linux":
        return
    m_trim_threshold, m_mmap_threshold, limit = -1, -3, 1 << 25
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, limit)
        libc.mallopt(m_trim_threshold, 1 << 30)
