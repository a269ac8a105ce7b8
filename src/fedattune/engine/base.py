"""Define engines: train some clients, evaluate some clients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.algorithm import ClientUpdate
from ..core.errors import ConfigError
from ..core.losses import CLASS_WEIGHTS, average_parts, compute_loss, compute_sample_losses
from ..core.params import Params, clip_norm, take
from ..core.payload import Batch, Grad, LocalState, Payload
from ..core.targets import TargetKind
from ..core.task import Task
from ..data import Federation
from ..data.augmentation import split_moves
from .batches import LocalTraining
from .kernels import replace_slow_calls

SHARED_EVALUATION_BYTES = 1 << 26

INPUT_CACHE_BYTES = 1 << 28
"""Model inputs of evaluated parts that stay in memory between rounds, if they take less than this."""

EvalPart = Literal["validation", "test"]
"""A part of a client's data that is evaluated."""

EVALUATED_PARTS: tuple[EvalPart, ...] = ("test", "validation")


class ClientInputs(NamedTuple):
    """The start of local training, one row per client; see `ClientUpdate` for the terms.

    `sent` holds all parameters, also those that never left the client; `is_uploaded` is `RoundContext.is_uploaded`.
    """

    sent: Payload
    local_state: LocalState
    buffers: Params
    fresh: Tensor
    is_uploaded: Tensor

    def rows(self, ids: Tensor | int) -> "ClientInputs":
        selected: ClientInputs = tree_map(partial(take, ids=ids), self)
        return selected


class ClientOutputs(NamedTuple):
    """The result of local training, one row per client: upload, local state, buffers, and number of steps (C,).

    `old_buffers` are the buffers before training.
    """

    upload: Payload
    local_state: LocalState
    buffers: Params
    n_steps: Tensor
    old_buffers: Params = Params()

    def rows(self, ids: Tensor) -> "ClientOutputs":
        selected: ClientOutputs = tree_map(partial(take, ids=ids), self)
        return selected

    def find_finite(self) -> Tensor:
        """Tell which clients (C,) have finite numbers only; a buffer that training left alone may hold others."""
        found = [_has_finite_sum(v) for v in tree_leaves((self.upload, self.local_state, self.n_steps))]
        for name, v in self.buffers.items():
            is_finite = _has_finite_sum(v)
            if name in self.old_buffers and not is_finite.all():  # such as a mask of -inf
                is_finite |= (v == self.old_buffers[name]).reshape(len(v), -1).all(1)
            found.append(is_finite)
        return torch.stack(found).all(0)


def _has_finite_sum(stack: Tensor) -> Tensor:
    """Tell where a stack (C, ...) has a finite sum, as finite values do; to test each takes 50 times as long."""
    return stack.reshape(len(stack), -1).sum(1).isfinite()


class Scores(NamedTuple):
    """Scores per evaluated client, each (E,): samples, correct predictions, and the sum of losses.

    Where a target has several labels or positions, a prediction counts by the share of them that are right.
    """

    n: Tensor
    correct: Tensor
    loss: Tensor

    @classmethod
    def zeros(cls, sizes: Tensor, kind: TargetKind = "class") -> "Scores":
        dtype = torch.float64 if kind in ("labels", "positions") else sizes.dtype
        return cls(sizes, torch.zeros_like(sizes, dtype=dtype), torch.zeros_like(sizes, dtype=torch.float64))

    def split(self, n: int) -> "list[Scores]":
        columns = (torch.split(column, n) for column in self)
        return [Scores(*some) for some in zip(*columns, strict=True)]


class _SharedBatch(NamedTuple):
    """Samples that one model predicts at once: rows of the scores, sample numbers, labels, and inputs if kept."""

    rows: Tensor
    samples: Tensor
    y: Tensor
    x: Tensor | None


class Engine(ABC):
    """Run client updates of one task on one federation, without knowing the algorithm or the server."""

    def __init__(self, task: Task, federation: Federation) -> None:
        self.task = task
        self.federation = federation
        self.device = federation.y.device
        self.dtype = next(iter(task.params.values())).dtype
        self._differentiate = task.gradient
        self._shared_batches: tuple[Sequence[Any], list[_SharedBatch]] = ((), [])

    @abstractmethod
    def take_rows(self, federation: Federation) -> "Engine":
        """Return an engine like this one, to evaluate clients on other rows of theirs."""

    def train(self, rule: ClientUpdate, ids: Tensor, inputs: ClientInputs, training: LocalTraining) -> ClientOutputs:
        """Train clients `ids` (C,) for one round; return one row per client, in this order."""
        buffers = inputs.buffers
        if self._class_weights is not None:
            buffers = Params({**buffers, CLASS_WEIGHTS: self._class_weights[ids]})
        outputs = self._train(rule, ids, inputs._replace(buffers=buffers), training)
        return outputs._replace(buffers=outputs.buffers.without({CLASS_WEIGHTS}), old_buffers=inputs.buffers)

    @cached_property
    def _class_weights(self) -> Tensor | None:
        """Each client's class weights in the training loss (N, classes); None for none."""
        if not self.task.loss.has_class_weights:
            return None
        weights = self.task.loss.make_class_weights(self.federation.label_counts("train"))
        return torch.from_numpy(weights).to(self.device, self.dtype)

    @abstractmethod
    def _train(self, rule: ClientUpdate, ids: Tensor, inputs: ClientInputs, training: LocalTraining) -> ClientOutputs:
        """Train clients as `train` does, with all buffers that the loss needs."""

    @abstractmethod
    def evaluate_each(self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        """Evaluate models (E, ...) of clients `ids` (E,), each on the client's own parts; return scores by part."""

    def evaluate(self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        """Evaluate models (E, ...) of clients `ids` (E,) on their parts; run one shared model over all data at once."""
        if not parts:
            return []
        with torch.no_grad():
            if all(v.stride(0) == 0 for v in params.values()) and not buffers:
                return self._evaluate_shared(params.rows(0), parts, ids)
            return self.evaluate_each(params, buffers, parts, ids)

    def _evaluate_shared(self, params: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        sizes = self._sizes(parts, ids)
        key, batches = (*parts, *ids.tolist()), self._shared_batches[1]
        if self._shared_batches[0] != key:
            batches = self._make_shared_batches(parts, ids, sizes)
            self._shared_batches = key, batches
        scores = Scores.zeros(sizes, self.federation.kind)
        for rows, samples, y, kept in batches:
            x = self.federation.features(samples, self.dtype) if kept is None else kept
            with replace_slow_calls(self.device):
                right, losses = score_samples(self.task.predict(params, Params(), x), y, self.federation.kind)
            scores.correct.index_add_(0, rows, right.to(scores.correct.dtype))
            scores.loss.index_add_(0, rows, losses.double())
        return scores.split(len(ids))

    def _make_shared_batches(self, parts: Sequence[EvalPart], ids: Tensor, sizes: Tensor) -> list[_SharedBatch]:
        numbers = [self.federation.part(part)[i] for part in parts for i in ids.tolist()]
        index = torch.cat([torch.as_tensor(some) for some in numbers]).to(self.device)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=self.device), sizes)
        keep, size = keeps_inputs(self.federation, len(index), self.dtype), self._samples_at_once()
        return [
            _SharedBatch(
                rows, some, self.federation.y[some], self.federation.features(some, self.dtype) if keep else None
            )
            for rows, some in zip(torch.split(owner, size), torch.split(index, size), strict=True)
        ]

    def _sizes(self, parts: Sequence[EvalPart], ids: Tensor) -> Tensor:
        """Count the samples of clients `ids` (E,): one part's (E,) after the other's."""
        return torch.cat([self.federation.sizes(part)[ids.cpu()] for part in parts]).to(self.device)

    def _samples_at_once(self) -> int:
        """Choose the samples of one evaluation batch: few if activations are large."""
        values = max(1, math.prod(self.federation.input_shape))
        activations = 16 if self.task.has_convolutions else 1
        return self.task.limit_samples(max(64, SHARED_EVALUATION_BYTES // (8 * values * activations)), values)

    def _batch(self, index: Tensor, padded: bool) -> Batch:
        """Gather the batch of sample numbers `index` (..., B); -1 becomes a sample of weight 0."""
        real, moves = split_moves(index.clamp_min(0) if padded else index)
        x, y = self.federation.features(real, self.dtype, moves), self.federation.y[real]
        return (x, y, (index >= 0).to(self.dtype)) if padded else (x, y)

    def _gradient(self, buffers: list[Params], training: LocalTraining, noise: Tensor | None = None) -> Grad:
        """Make the gradient function of one client in one step; each call takes the next row of private `noise`."""
        if training.privacy is not None:
            return self._private_gradient(buffers[0], training, noise)

        def gradient(w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:
            g, changed = self._differentiate(w, buffers[0], batch)
            if statistics:
                buffers[0] = changed
            if training.max_grad_norm is not None:
                g = clip_norm(g, training.max_grad_norm)
            return g + training.weight_decay * w if training.weight_decay else g

        return gradient

    def _private_gradient(self, buffers: Params, training: LocalTraining, noise: Tensor | None) -> Grad:
        rows = iter(() if noise is None else noise.unbind())
        privacy = training.privacy
        assert privacy is not None

        def gradient(w: Params, batch: Batch, /, *, statistics: bool = True) -> Params:  # noqa: ARG001
            row = next(rows, None)
            if row is None:  # noise that is used twice would cancel out
                raise ConfigError(
                    f"the noise on gradients: the client rule takes more gradients in a step than the "
                    f"{sum(privacy.calls)} that are accounted for; their number must be the same in every step"
                )
            sizes = [v.numel() for v in self.task.params.values()]
            parts = dict(zip(self.task.params, torch.split(row, sizes), strict=True))
            g = self.task.clipped_gradient(w, buffers, batch, privacy.clip)
            g = Params({k: v + parts[k].view_as(v) for k, v in g.items()})
            return g + training.weight_decay * w if training.weight_decay else g

        return gradient


class TaskLoss(NamedTuple):
    """The loss and the predictions of one client's models; the buffers are the first of the list."""

    task: Task
    buffers: list[Params]

    def __call__(self, w: Params, batch: Batch, /) -> Tensor:
        return compute_loss(self.predict(w, batch[0]), batch)

    def predict(self, w: Params, x: Tensor, /) -> Tensor:
        return self.task.predict(w, self.buffers[0], x)


def keeps_inputs(federation: Federation, samples: int, dtype: torch.dtype) -> bool:
    """Tell whether the model inputs of evaluated samples stay in memory between rounds."""
    return samples * math.prod(federation.input_shape) * dtype.itemsize < INPUT_CACHE_BYTES


def score_samples(outputs: Tensor, y: Tensor, kind: TargetKind = "class") -> tuple[Tensor, Tensor]:
    """Find the right predictions and the losses of samples; of numbers, none counts as right.

    Of several labels or positions, it is the share of them that are right, float64.
    """
    if kind not in ("class", "number"):
        return _score_parts(outputs, y, kind)
    if y.is_floating_point():
        losses = (outputs.squeeze(-1).to(y.dtype) - y) ** 2
        return torch.zeros_like(losses, dtype=torch.bool), losses
    logits = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    z = logits - logits.amax(-1, keepdim=True)
    own = z.gather(-1, y[..., None]).squeeze(-1)
    right = own == 0  # of logits that are no numbers, none
    # To find the class of the largest logit takes a CPU thirty times as long as to find the logit. It differs at ties
    # alone, where the first class wins. A GPU finds both alike, and the count would have Python wait for it.
    if z.device.type != "cpu" or z.numel() - torch.count_nonzero(z) > own.numel():
        right &= logits.argmax(-1) == y
    return right, z.exp_().sum(-1).log_().sub_(own)


def _score_parts(outputs: Tensor, y: Tensor, kind: TargetKind) -> tuple[Tensor, Tensor]:
    """Score samples whose targets have several parts, y (B, parts) or (B, *positions)."""
    losses = compute_sample_losses(outputs, y)
    if kind == "numbers":
        return torch.zeros_like(losses, dtype=torch.bool), losses
    right = (outputs > 0 if kind == "labels" else outputs.argmax(1)) == y
    return average_parts(right.double(), y), losses


def score_block(outputs: Tensor, y: Tensor, kind: TargetKind) -> tuple[Tensor, Tensor]:
    """Score m samples of each of C models as `score_samples` does; return (C, m) of both."""
    if kind in ("class", "number"):
        return score_samples(outputs, y, kind)
    right, losses = score_samples(outputs.flatten(0, 1), y.flatten(0, 1), kind)
    return right.view(y.shape[:2]), losses.view(y.shape[:2])
