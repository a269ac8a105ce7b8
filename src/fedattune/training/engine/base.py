"""What an engine does: train some clients, evaluate all of them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...core.algorithm import ClientUpdate
from ...core.params import Params
from ...core.payload import Batch, Grad, LocalState, Loss, Payload
from ...core.task import Task, cross_entropy, sample_losses
from ...data import Federation
from .batches import LocalTraining

SHARED_EVALUATION_BYTES = 1 << 26


EvalPart = Literal["validation", "test"]
"""A part that is evaluated."""


class ClientInputs(NamedTuple):
    """What training starts from, one row per client: see `ClientUpdate` for the words.

    `sent` holds all parameters, those that never left the client among them; `is_uploaded` is that of `Job`.
    """

    sent: Payload
    local_state: LocalState
    buffers: Params
    fresh: Tensor
    is_uploaded: Tensor

    def rows(self, ids: Tensor | int) -> "ClientInputs":
        """The inputs of some clients."""
        return ClientInputs(
            self.sent.rows(ids),
            take_rows(self.local_state, ids),
            self.buffers.rows(ids),
            self.fresh[ids],
            self.is_uploaded[ids],
        )


class ClientOutputs(NamedTuple):
    """What training leaves, one row per client: the upload, the client's memory, its buffers, its steps (C,)."""

    upload: Payload
    local_state: LocalState
    buffers: Params
    n_steps: Tensor

    def rows(self, ids: Tensor) -> "ClientOutputs":
        """What training left on some clients."""
        return ClientOutputs(
            self.upload.rows(ids), take_rows(self.local_state, ids), self.buffers.rows(ids), self.n_steps[ids]
        )

    def find_finite(self) -> Tensor:
        """(C,) whether everything that a client uploads and keeps is finite."""
        parts = [self.upload.params, *self.upload.extra.values(), *self.local_state.values(), self.buffers]
        # The sum of all values is finite where all are; looking at each takes 50 times as long.
        sums = [v.reshape(len(v), -1).sum(1).isfinite() for part in parts for v in part.values()]
        return torch.stack(sums).all(0)


class Scores(NamedTuple):
    """Per evaluated client: samples, how many were classified rightly, and the sum of their losses; each (E,)."""

    n: Tensor
    correct: Tensor
    loss: Tensor


class Engine(ABC):
    """Runs client updates of one task on one federation; knows nothing of methods and servers."""

    def __init__(self, task: Task, federation: Federation) -> None:
        self.task = task
        self.federation = federation
        self.device = federation.y.device
        self.dtype = next(iter(task.params.values())).dtype

    @abstractmethod
    def train(
        self, rule: ClientUpdate, ids: Tensor, inputs: ClientInputs, work: LocalTraining
    ) -> ClientOutputs:
        """Train clients `ids` (C,); inputs and result have one row per client, in this order."""

    @abstractmethod
    def evaluate_each(self, params: Params, buffers: Params, part: EvalPart, ids: Tensor) -> Scores:
        """Evaluate a model of its own (E, ...) for each of clients `ids` (E,) on its own part."""

    def evaluate(self, params: Params, buffers: Params, part: EvalPart, ids: Tensor) -> Scores:
        """Evaluate models (E, ...) of clients `ids` (E,) on their parts; one for all is run over all data once."""
        with torch.no_grad():
            if all(v.stride(0) == 0 for v in params.values()) and not buffers:
                return self._evaluate_shared(params.rows(0), part, ids)
            return self.evaluate_each(params, buffers, part, ids)

    def _evaluate_shared(self, params: Params, part: EvalPart, ids: Tensor) -> Scores:
        sizes = self._sizes(part, ids)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=self.device), sizes)
        parts = self.federation.part(part)
        index = torch.cat([torch.as_tensor(parts[i]) for i in ids.tolist()]).to(self.device)
        correct = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(sizes), dtype=torch.float64, device=self.device)
        for i, who in zip(
            torch.split(index, self._samples_at_once()),
            torch.split(owner, self._samples_at_once()),
            strict=True,
        ):
            right, losses = score_samples(
                self.task.predict(params, Params(), self.federation.features(i, self.dtype)),
                self.federation.y[i],
            )
            correct.index_add_(0, who, right.long())
            loss.index_add_(0, who, losses.double())
        return Scores(sizes, correct, loss)

    def _sizes(self, part: EvalPart, ids: Tensor) -> Tensor:
        """Samples (E,) of clients `ids`."""
        return self.federation.sizes(part)[ids.cpu()].to(self.device)

    def _samples_at_once(self) -> int:
        """Samples of one evaluation batch: few when activations are large."""
        values = max(1, math.prod(self.federation.input_shape))
        activations = 16 if self.task.convolutional else 1
        return max(64, SHARED_EVALUATION_BYTES // (8 * values * activations))

    def _batch(self, index: Tensor, padded: bool) -> Batch:
        """The batch of sample numbers `index` (...,  B); -1 becomes a sample of weight 0."""
        real = index.clamp_min(0) if padded else index
        x, y = self.federation.features(real, self.dtype), self.federation.y[real]
        return (x, y, (index >= 0).to(self.dtype)) if padded else (x, y)

    def _gradient(self, buffers: list[Params], work: LocalTraining) -> Grad:
        """The gradient function for one client; `buffers[0]` is replaced at every call that says so."""

        def gradient(w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:
            g, changed = self.task.gradient(w, buffers[0], batch)
            if statistics:
                buffers[0] = changed
            return g + work.weight_decay * w if work.weight_decay else g

        return gradient

    def _loss(self, buffers: list[Params]) -> Loss:
        """The loss function for one client in evaluation mode."""
        return lambda w, batch: cross_entropy(self.task.predict(w, buffers[0], batch[0]), batch)


def score_samples(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each sample (B,) is classified rightly, and its cross-entropy."""
    largest, label = logits.max(1, keepdim=True)
    return label.squeeze(1) == y, sample_losses(logits, y, largest)


def take_rows(memory: LocalState, ids: Tensor | int | slice) -> LocalState:
    """Rows of every part of a memory."""
    return {k: v.rows(ids) for k, v in memory.items()}


def join_outputs(
    results: Sequence[ClientOutputs], how: Callable[[Sequence[Params]], Params]
) -> ClientOutputs:
    """One result of several, the tensors put together by `how` (stack single clients, concatenate chunks)."""
    uploads, memories, buffers, n_steps = zip(*results, strict=True)
    return ClientOutputs(
        Payload(
            how([u.params for u in uploads]),
            {k: how([u.extra[k] for u in uploads]) for k in uploads[0].extra},
        ),
        {k: how([m[k] for m in memories]) for k in memories[0]},
        how(buffers),
        how([Params(n=n) for n in n_steps])["n"],
    )
