"""Methods that change the model: they train a network built from the user's, split into body and head."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import ConfigError, ModelError, brief
from .params import Params


@dataclass(frozen=True)
class Network(ABC):
    """Builds what a method trains in place of the user's model.

    The module that `wrap` returns takes inputs (B, ...) and returns logits (B, classes) in evaluation mode. In
    training mode it may return anything that its method `objective(output, batch)` makes a scalar loss of; without
    such a method, it is cross-entropy. An attribute `batch_statistics = True` says that its loss depends on the
    batch as a whole, so that batches must not be padded.
    """

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


def split(model: nn.Module, x: Tensor, head: str | None = None) -> tuple[nn.Module, nn.Linear]:
    """Copies of the model without its head, and of the head: the last `nn.Linear`, or the one called `head`.

    Raises:
        ConfigError: there is no such linear layer.
        ModelError: the model has no linear layer, or is not its head applied to what comes before.

    """
    name = type(model).__name__
    linear = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ModelError(f"the model {name} cannot be split into body and head: it has no nn.Linear layer")
    if head is not None and head not in linear:
        raise ConfigError(
            f"head: got {head!r}, expected a linear layer of the model {name}: {', '.join(linear)}"
        )
    chosen = head or linear[-1]
    body = copy.deepcopy(model)
    last = copy.deepcopy(model.get_submodule(chosen))
    assert isinstance(last, nn.Linear)
    if not chosen:
        return nn.Identity(), last
    parent, _, attribute = chosen.rpartition(".")
    setattr(body.get_submodule(parent), attribute, nn.Identity())
    whole = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            same = torch.allclose(last(body.eval()(x)), whole(x), rtol=1e-4, atol=1e-5)
    except Exception as error:
        raise ModelError(
            f"the model {name} cannot be split into body and head at {chosen!r}: {brief(error)}"
        ) from error
    if not same:
        raise ModelError(
            f"the model {name} cannot be split into body and head: its output is not that of its layer {chosen!r}; "
            "let the model end with that linear layer, or name another one as head"
        )
    return body.train(), last
