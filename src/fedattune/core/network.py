"""Methods that change the model: they train a network built from the user's, split into body and head."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, ModelError, summarize_error
from .params import Params


class MethodModule(nn.Module, ABC):
    """A module that a method trains in place of the user's model, with the method's loss.

    It takes inputs (B, ...) and returns logits (B, classes) in evaluation mode; in training mode it may return
    anything that `objective` makes a loss of.
    """

    batch_statistics = False
    """Whether the loss depends on the batch as a whole, so that batches must not be padded."""

    @abstractmethod
    def objective(self, output: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """The scalar training loss."""


@dataclass(frozen=True)
class Network(ABC):
    """Builds what a method trains in place of the user's model: a `MethodModule`, or any other with cross-entropy."""

    @property
    def generic(self) -> bool:
        """Whether the module with zeros for its personal tensors is the global model."""
        return False

    @abstractmethod
    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        """The module to train; x (B, ...) are some inputs to check it with.

        Raises:
            ModelError: the model cannot be split.

        """

    def client_buffers(self, label_counts: Tensor) -> Params:
        """Buffers (N, ...) that differ between clients, from their training samples per class (N, classes)."""
        return Params()


def split_head(model: nn.Module, x: Tensor, head: str | None = None) -> tuple[nn.Module, nn.Linear]:
    """Copies of the model without its head, and of the head: the `nn.Linear` that makes its output from features.

    It is searched by type, from the last linear layer to the first, or is the one called `head`; x (B, ...) are some
    inputs to check it with.

    Raises:
        ConfigError: there is no such linear layer.
        ModelError: no trainable linear layer of the model makes its output.

    """
    name = type(model).__name__
    linear = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ModelError(f"the model {name} cannot be split into body and head: it has no nn.Linear layer")
    if head is not None and head not in linear:
        raise ConfigError(
            f"head: got {head!r}, expected a linear layer of the model {name}: {', '.join(linear)}"
        )
    x = x.to(next(model.parameters()))
    whole = copy.deepcopy(model).eval()
    with torch.no_grad():
        output = whole(x)
    problems = []
    for chosen in reversed(linear) if head is None else [head]:
        body, last = _cut(model, chosen)
        try:
            with torch.no_grad():
                same = torch.allclose(last(body.eval()(x)), output, rtol=1e-4, atol=1e-5)
            if same and last.weight.requires_grad:
                return body.train(), last
            reason = "is frozen (requires_grad=False)" if same else "is not what makes its output"
            problems.append(f"{chosen!r} {reason}")
        except Exception as error:
            problems.append(f"{chosen!r}: {summarize_error(error)}")
    raise ModelError(
        f"the model {name} cannot be split into body and head: its output must be that of a trainable nn.Linear layer "
        f"applied to features ({problems[0]}); let the model end with such a layer"
    )


def _cut(model: nn.Module, layer: str) -> tuple[nn.Module, nn.Linear]:
    """Copies of the model with nothing in place of a layer, and of the layer."""
    last = copy.deepcopy(model.get_submodule(layer))
    assert isinstance(last, nn.Linear)
    if not layer:
        return nn.Identity(), last
    body = copy.deepcopy(model)
    parent, _, attribute = layer.rpartition(".")
    setattr(body.get_submodule(parent), attribute, nn.Identity())
    return body, last
