"""Compute the loss of outputs: of each sample, and its mean over a batch.

Models are evaluated by `compute_loss`, always. Clients train on it, too, unless the settings choose another
`TrainingLoss`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss, logsigmoid

from .errors import ConfigError, list_some, summarize_error
from .own_code import is_reference, load_function
from .payload import Batch
from .settings import BALANCED, LossOptions, read_class_weights
from .targets import IGNORED, KIND_WORDS, NUMBER_KINDS, TargetKind

SampleLosses = Callable[[Tensor, Tensor], Tensor]
"""Compute the loss of each sample (B,) from outputs (B, ...) and targets (B, ...)."""

LossFunction = Callable[[Tensor, Batch], Tensor]
"""Compute the loss of a batch, a scalar, from the outputs (B, ...) for it."""

CLASS_WEIGHTS = "class weights of the training loss"
"""Name of a client's class weights (classes,) among its buffers while it trains; no buffer of a model has such one."""


def compute_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the mean over samples of `compute_sample_losses`; padding has weight 0 and does not count."""
    _, y, *weight = batch
    losses = compute_sample_losses(outputs, y)
    return (losses * weight[0]).sum() / weight[0].sum() if weight else losses.mean()


def compute_sample_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss (B,) of each sample, by the kind of its target; a target of several parts counts by their mean.

    Cross-entropy of class numbers y (B,) by logits (B, classes), or y (B, *positions) by (B, classes, *positions);
    squared error of numbers (B,) by (B, 1), or (B, M) by (B, M); binary cross-entropy of labels (B, L) by (B, L).
    PyTorch's softmax over few classes takes five times as long as these operations.
    """
    return average_parts(compute_part_losses(outputs, y), y)


def compute_part_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the losses of all parts of targets y, in its shape; see `compute_sample_losses`."""
    if y.is_floating_point():
        return (_as_targets(outputs, y) - y) ** 2
    logits = outputs
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    if y.dtype == torch.bool:
        return (1 - y.to(logits.dtype)) * logits - logsigmoid(logits)  # as PyTorch, whose function has no script
    if y.dim() > 1:
        return cross_entropy(logits, y, reduction="none", ignore_index=IGNORED)
    z = logits - logits.detach().amax(1, keepdim=True)
    return z.exp().sum(1).log() - z.gather(1, y[:, None]).squeeze(1)


def _as_targets(outputs: Tensor, y: Tensor) -> Tensor:
    """Return predicted numbers (B, 1) or (B, M) in the shape of targets y, (B,) or (B, M)."""
    return (outputs if y.dim() > 1 else outputs.squeeze(1)).to(y.dtype)


def average_parts(values: Tensor, y: Tensor) -> Tensor:
    """Return the mean (B,) of values of the parts of targets y; of positions, of those that are not ignored, or 0."""
    if y.dim() == 1:
        return values
    if y.dtype == torch.bool or y.is_floating_point():
        return values.mean(1)
    counts = (y != IGNORED).flatten(1)
    return (values.flatten(1) * counts).sum(1) / counts.sum(1).clamp_min(1)


def compute_focal_losses(outputs: Tensor, y: Tensor, *, gamma: float) -> Tensor:
    """Return (1 - p)^gamma times the cross-entropy -log p (B,), p the probability of the class y (B,).

    Of several labels or positions, it is the mean of theirs.
    Source: Lin et al., Focal Loss for Dense Object Detection (ICCV 2017), equation 4.
    """
    losses = compute_part_losses(outputs, y)
    # A gamma below 1 has no slope at p = 1.
    others = (-torch.expm1(-losses)).clamp_min(torch.finfo(losses.dtype).tiny)
    return average_parts(others**gamma * losses, y)


def compute_absolute_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the absolute error (B,) of numbers (B, 1) that are predicted for y (B,); the mean of several (B, M)."""
    return average_parts((_as_targets(outputs, y) - y).abs(), y)


def compute_huber_losses(outputs: Tensor, y: Tensor, *, delta: float) -> Tensor:
    """Return half the squared error, and beyond an error of delta its tangent (B,): PyTorch's `huber_loss`."""
    return average_parts(huber_loss(_as_targets(outputs, y), y, reduction="none", delta=delta), y)


def compute_smooth_losses(outputs: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return the mean over classes of the cross-entropies with each of them (B,), times the classes' weights."""
    each = -outputs.log_softmax(1)
    return (each if class_weights is None else each * class_weights).mean(1)


@dataclass(frozen=True)
class TrainingLoss:
    """The loss that clients train on; by default `compute_loss`.

    Attributes:
        sample_losses: the loss of each sample.
        label_smoothing: share of the loss that is the mean over all classes, as in `torch.nn.CrossEntropyLoss`.
        class_weights: one weight per class; empty for none, None for each client's own balanced weights.
    """

    sample_losses: SampleLosses = compute_sample_losses
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = ()

    @property
    def is_balanced(self) -> bool:
        """True if the class weights follow from each client's training samples."""
        return self.class_weights is None

    @property
    def has_class_weights(self) -> bool:
        """True if samples count by their class."""
        return self.class_weights != ()

    def make_class_weights(self, label_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the class weights of clients (N, classes) from their training samples of each class.

        Balanced weights are scikit-learn's: n / (classes * count) with the client's n samples and its classes. They are
        1 on average over samples, and so is the weight of a class that a client lacks.
        """
        if self.class_weights is None:
            n, present = label_counts.sum(1, keepdims=True), (label_counts > 0).sum(1, keepdims=True)
            return np.where(label_counts > 0, n / np.maximum(1, present * label_counts), 1.0)
        return np.tile(self.class_weights, (len(label_counts), 1))

    def bind(self, class_weights: Tensor | None, *, is_mean: bool = True) -> LossFunction:
        """Return the loss of a batch with these class weights (classes,), a scalar.

        Weights of classes count in the mean over samples, so that their scale has no effect. Without `is_mean`, it is
        the sum over samples, in which a sample's loss is the same in every batch.
        """
        if class_weights is None and not self.label_smoothing and self.sample_losses is compute_sample_losses:
            return compute_loss  # of a single sample, the sum is the mean
        return partial(self._compute, class_weights=class_weights, is_mean=is_mean)

    def _compute(self, outputs: Tensor, batch: Batch, *, class_weights: Tensor | None, is_mean: bool) -> Tensor:
        _, y, *weight = batch
        outputs = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
        losses = self.sample_losses(outputs, y)
        weights = torch.ones_like(losses) if class_weights is None else class_weights.gather(0, y).to(losses.dtype)
        losses = losses * weights
        if self.label_smoothing:
            smooth = compute_smooth_losses(outputs, class_weights)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * smooth
        if weight:
            losses, weights = losses * weight[0], weights * weight[0]
        return losses.sum() / weights.sum() if is_mean else losses.sum()


DEFAULT_LOSS = TrainingLoss()
"""The loss of a run whose settings choose none."""


def make_loss(
    options: LossOptions, classes: Sequence[str], kind: TargetKind | None = None, output_shape: tuple[int, ...] = ()
) -> TrainingLoss:
    """Make the loss of local training.

    Args:
        options: the settings of the loss.
        classes: the classes of the target; none for labels and numbers.
        kind: kind of the target; by default a class, or a number if there are no classes.
        output_shape: shape of the outputs for one sample; by default one for each class, or one.

    Raises:
        ConfigError: the loss does not suit the target, or a custom loss does not give one number per sample.
    """
    name, kind = options.name, kind or ("class" if classes else "number")
    if is_reference(name):
        sample_losses = _load_custom(name, kind, output_shape or (max(1, len(classes)),))
    elif name == "focal":
        sample_losses = partial(compute_focal_losses, gamma=options.focal_gamma)
    elif name == "huber":
        sample_losses = partial(compute_huber_losses, delta=options.huber_delta)
    else:
        sample_losses = {"auto": compute_sample_losses, "absolute": compute_absolute_losses}[name]
    is_number = kind in NUMBER_KINDS
    fits = {"focal": not is_number, "absolute": is_number, "huber": is_number}
    if not fits.get(name, True):
        takes = "auto (squared error), absolute or huber" if is_number else "auto (cross-entropy) or focal"
        raise ConfigError(
            f"loss: got {name}, and the target is {KIND_WORDS[kind]}, which takes {takes}; or give a custom loss as "
            "file.py:loss"
        )
    if kind != "class":
        for key, value in options.corrections.items():
            lacks = "has no classes" if not classes else "takes none"
            raise ConfigError(f"{key}: got {value}, and the target is {KIND_WORDS[kind]}, which {lacks}; leave it out")
    return TrainingLoss(sample_losses, options.label_smoothing, _resolve_weights(options.class_weights, classes))


def _resolve_weights(text: str | None, classes: Sequence[str]) -> tuple[float, ...] | None:
    if text is None or text == BALANCED:
        return None if text else ()
    given = read_class_weights(text)
    if isinstance(given, list):
        if len(given) != len(classes):
            raise ConfigError(
                f"class_weights: got {len(given)} numbers, expected one for each of the {len(classes)} classes, in the "
                f"order {list_some(classes, 20)}"
            )
        return tuple(given)
    missing, unknown = [one for one in classes if one not in given], [one for one in given if one not in classes]
    if missing or unknown:
        wrong = f"no class is called {list_some(unknown, 5)}" if unknown else f"none is for {list_some(missing, 5)}"
        raise ConfigError(f"class_weights: {wrong}, expected a weight for each of the classes {list_some(classes, 20)}")
    return tuple(given[one] for one in classes)


def _load_custom(reference: str, kind: TargetKind, output_shape: tuple[int, ...]) -> SampleLosses:
    function = load_function(reference, "the loss")
    # The losses of two samples, and of each alone: padding must not change the loss of another sample.
    outputs = torch.linspace(-1.0, 1.0, 2 * prod(output_shape)).view(2, *output_shape)
    y = torch.arange(2) if kind == "class" else torch.tensor([0.5, -1.0])
    if kind in ("labels", "numbers"):
        y = outputs > 0.2 if kind == "labels" else outputs.flip(1)
    elif kind == "positions":
        y = torch.arange(2 * prod(output_shape[1:])).view(2, *output_shape[1:]) % 2
    try:
        with torch.enable_grad():
            both = function(outputs.requires_grad_(), y)
            alone: list[Any] = [function(outputs[i : i + 1], y[i : i + 1]) for i in range(2)]
    except Exception as error:
        raise ConfigError(
            f"loss: {reference} fails on outputs {tuple(outputs.shape)} and targets {tuple(y.shape)}: "
            f"{summarize_error(error)}; expected a function loss(outputs, targets) that returns one loss per sample"
        ) from error
    if not isinstance(both, Tensor) or both.shape != (2,) or not both.is_floating_point():
        got = tuple(both.shape) if isinstance(both, Tensor) else type(both).__name__
        raise ConfigError(
            f"loss: {reference} returned {got} for 2 samples, expected the loss of each, (2,), because padding needs "
            "weight 0; leave out the mean (reduction='none')"
        )
    if not both.requires_grad:
        raise ConfigError(f"loss: {reference} gives no gradient; compute it from the outputs with PyTorch's functions")
    if not torch.allclose(both, torch.cat([one.reshape(1) for one in alone])):
        raise ConfigError(
            f"loss: in {reference}, the loss of a sample depends on the other samples of its batch, expected it to "
            "depend on its own output and target alone"
        )
    return function
