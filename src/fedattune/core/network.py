"""Support methods that change the user's model: build a module from its body and head."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .effect import Effect
from .errors import ModelError, summarize_error
from .losses import LossFunction
from .params import Params
from .payload import Batch
from .targets import TargetKind


class MethodModule(nn.Module, ABC):
    """A module that a method trains in place of the user's model, with the method's own loss.

    In evaluation mode, it maps inputs (B, ...) to logits (B, classes). In training mode, it may return anything that
    `objective` accepts.
    """

    has_batch_loss = False
    """True if the loss depends on the batch as a whole; batches are then never padded."""

    client_scalars: ClassVar[Mapping[str, str]] = {}
    """Word -> name of a parameter with one value, which a run reports of every client where models are at hand.

    `shared` is for the weight of the shared model, 0 to 1, beside the client's own: `explain` and the verdict tell it.
    """

    kind: TargetKind = "class"
    """Kind of the target, on which sums of predictions depend; set after the module is built."""

    @abstractmethod
    def objective(self, output: Any, batch: Batch, loss: LossFunction) -> Tensor:
        """Return the training loss, a scalar, from the module's output in training mode.

        `loss` is the run's loss of logits (B, classes) and a batch, by default `fedattune.core.losses.compute_loss`.
        """

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the module's mechanisms on one client's inputs (B, ...), in evaluation mode."""
        return ()


@dataclass(frozen=True)
class Network(ABC):
    """Builds the module that a method trains: a `MethodModule`, or any module that trains on cross-entropy."""

    generic: ClassVar[bool] = False
    """True if the module is the global model once its personal tensors are zero."""

    class_need: ClassVar[str | None] = None
    """The reason why the method needs classes; None if the target may also be a number."""

    balance: ClassVar[str | None] = None
    """The part of the method's loss that balances classes by their counts, instead of class weights; None for none."""

    @abstractmethod
    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        """Return the module to train; `x` (B, ...) are inputs to check it with.

        Raises:
            ModelError: the model has no body and head.
        """

    def client_buffers(self, label_counts: Tensor) -> Params:
        """Return buffers (N, ...) that differ between clients, from the training samples per class (N, classes)."""
        return Params()


def to_input(x: Tensor, model: nn.Module) -> Tensor:
    """Return samples on the device of a model; those that are no whole numbers in the type of its weights."""
    like = next(model.parameters())
    return x.to(like) if x.is_floating_point() else x.to(like.device)


def split_head(model: nn.Module, x: Tensor) -> tuple[nn.Module, nn.Linear]:
    """Copy the model's body and its head: the `nn.Linear` that maps features to the output.

    Inputs `x` (B, ...) check the split. The search goes from the last linear layer to the first.

    Raises:
        ModelError: no trainable linear layer makes the model's output.
    """
    name = type(model).__name__
    linear = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ModelError(f"the model {name} cannot be split into body and head: it has no nn.Linear layer")
    x = to_input(x, model)
    whole = copy.deepcopy(model).eval()
    with torch.no_grad():
        output = whole(x.clone())  # a model may write over its inputs
    problems = []
    for candidate in reversed(linear):
        body, last = _cut(model, candidate)
        try:
            with torch.no_grad():
                same = torch.allclose(last(body.eval()(x.clone())), output, rtol=1e-4, atol=1e-5)
            if same and last.weight.requires_grad:
                return body.train(), last
            reason = "is frozen (requires_grad=False)" if same else "does not make its output"
            problems.append(f"{candidate!r} {reason}")
        except Exception as error:
            problems.append(f"{candidate!r}: {summarize_error(error)}")
    raise ModelError(
        f"the model {name} cannot be split into body and head: a trainable nn.Linear layer must make its output "
        f"from features ({problems[0]}); let the model end with such a layer"
    )


def _cut(model: nn.Module, layer: str) -> tuple[nn.Module, nn.Linear]:
    """Copy the model with the identity in place of a layer, and copy the layer."""
    last = copy.deepcopy(model.get_submodule(layer))
    assert isinstance(last, nn.Linear)
    if not layer:
        return nn.Identity(), last
    body = copy.deepcopy(model)
    parent, _, attribute = layer.rpartition(".")
    setattr(body.get_submodule(parent), attribute, nn.Identity())
    return body, last
