"""Compute the loss of outputs: of each sample, and its mean over a batch.

Models are evaluated by `compute_loss`, always. Clients train on it, too, unless the settings choose another
`TrainingLoss`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import huber_loss

from .errors import ConfigError, list_some, summarize_error
from .own_code import is_reference, load_function
from .payload import Batch
from .settings import BALANCED, LossOptions, read_class_weights

SampleLosses = Callable[[Tensor, Tensor], Tensor]
"""Compute the loss of each sample (B,) from outputs (B, ...) and targets (B, ...)."""

LossFunction = Callable[[Tensor, Batch], Tensor]
"""Compute the loss of a batch, a scalar, from the outputs (B, ...) for it."""

CLASS_WEIGHTS = "class weights of the training loss"
"""Name of a client's class weights (classes,) among its buffers while it trains; no buffer of a model has such one."""


def compute_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss: cross-entropy of class numbers, squared error of targets that are numbers.

    Outputs are logits (B, classes), or predicted numbers (B, 1). Padding has weight 0 and does not count.
    """
    _, y, *weight = batch
    losses = compute_sample_losses(outputs, y)
    return (losses * weight[0]).sum() / weight[0].sum() if weight else losses.mean()


def compute_sample_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss (B,) of each sample: cross-entropy of class numbers y (B,), squared error of numbers.

    PyTorch's softmax over few classes takes five times as long as these operations.
    """
    if y.is_floating_point():
        return (outputs.squeeze(1).to(y.dtype) - y) ** 2
    logits = outputs
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    z = logits - logits.detach().amax(1, keepdim=True)
    return z.exp().sum(1).log() - z.gather(1, y[:, None]).squeeze(1)


def compute_focal_losses(outputs: Tensor, y: Tensor, *, gamma: float) -> Tensor:
    """Return (1 - p)^gamma times the cross-entropy -log p (B,), p the probability of the class y (B,).

    Source: Lin et al., Focal Loss for Dense Object Detection (ICCV 2017), equation 4.
    """
    losses = compute_sample_losses(outputs, y)
    # A gamma below 1 has no slope at p = 1.
    others = (-torch.expm1(-losses)).clamp_min(torch.finfo(losses.dtype).tiny)
    return others**gamma * losses


def compute_absolute_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the absolute error (B,) of numbers (B, 1) that are predicted for y (B,)."""
    return (outputs.squeeze(1).to(y.dtype) - y).abs()


def compute_huber_losses(outputs: Tensor, y: Tensor, *, delta: float) -> Tensor:
    """Return half the squared error, and beyond an error of delta its tangent (B,): PyTorch's `huber_loss`."""
    return huber_loss(outputs.squeeze(1).to(y.dtype), y, reduction="none", delta=delta)


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


def make_loss(options: LossOptions, classes: Sequence[str]) -> TrainingLoss:
    """Make the loss of local training for a target with these classes; there are none if it is a number.

    Raises:
        ConfigError: the loss does not suit the target, or a custom loss does not give one number per sample.
    """
    name = options.name
    if is_reference(name):
        sample_losses = _load_custom(name, len(classes))
    elif name == "focal":
        sample_losses = partial(compute_focal_losses, gamma=options.focal_gamma)
    elif name == "huber":
        sample_losses = partial(compute_huber_losses, delta=options.huber_delta)
    else:
        sample_losses = {"auto": compute_sample_losses, "absolute": compute_absolute_losses}[name]
    fits = {"focal": bool(classes), "absolute": not classes, "huber": not classes}
    if not fits.get(name, True):
        kind = "a class, which takes auto (cross-entropy) or focal" if classes else ""
        kind = kind or "a number, which takes auto (squared error), absolute or huber"
        raise ConfigError(f"loss: got {name}, and the target is {kind}; or give a custom loss as file.py:loss")
    if not classes:
        for key, value in options.corrections.items():
            raise ConfigError(f"{key}: got {value}, and the target is a number, which has no classes; leave it out")
    return TrainingLoss(sample_losses, options.label_smoothing, _resolve_weights(options.weights, classes))


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
        wrong = f"no class is called {list_some(unknown, 5)}" if unknown else f"{list_some(missing, 5)} has none"
        raise ConfigError(f"class_weights: {wrong}, expected a weight for each of the classes {list_some(classes, 20)}")
    return tuple(given[one] for one in classes)


def _load_custom(reference: str, n_classes: int) -> SampleLosses:
    function = load_function(reference, "the loss")
    # The losses of two samples, and of each alone: padding must not change the loss of another sample.
    outputs = torch.linspace(-1.0, 1.0, 2 * max(1, n_classes)).view(2, -1)
    y = torch.arange(2) if n_classes else torch.tensor([0.5, -1.0])
    try:
        with torch.enable_grad():
            both = function(outputs.requires_grad_(), y)
            alone: list[Any] = [function(outputs[i : i + 1], y[i : i + 1]) for i in range(2)]
    except Exception as error:
        raise ConfigError(
            f"loss: {reference} fails on outputs {tuple(outputs.shape)} and targets (2,): {summarize_error(error)}; "
            "expected a function loss(outputs, targets) that returns one loss per sample"
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
