"""Networks of two models for each client: a shared model, and the client's own model beside it; see `attune`."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..core.effect import OWN_MODEL, Effect, Mechanism
from ..core.errors import ModelError
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head, to_input
from ..core.params import Params
from ..core.payload import Batch

PRIOR_ROWS = 0.5
"""Rows that are added to the training rows of each class: no class is impossible."""

CLASS_WEIGHTS = (0.0, 0.5, 1.0)
"""Weights c of the class shares in the predictions of the shared model."""

N_PREDICTORS = 3 + len(CLASS_WEIGHTS)
"""The own model, and the shared model with the own head, the own intercept, and each weight of the class shares."""

GUARD = ("guard.share", "guard.parts")
"""Names of the weights among the parameters: the share of all predictions but the own model's, and its parts (5,)."""


def set_guard(w: Params, weights: Tensor) -> Params:
    """Return the model that mixes its predictors by weights (..., 6), which sum to 1."""
    share = 1 - weights[..., 0]
    parts = weights[..., 1:] / share.clamp_min(torch.finfo(share.dtype).tiny)[..., None]
    return Params({**w, **dict(zip(GUARD, (share, parts), strict=True))})


def mix_labels(logits: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Return the logits of the weighted mean over `dim` of the probabilities that each label is true."""
    log_weights = weights.clamp_min(torch.finfo(logits.dtype).tiny).log()
    true, false = ((log_weights + logsigmoid(one)).logsumexp(dim) for one in (logits, -logits))
    return true - false


class Intercept(nn.Module):
    """Adds a value to each output."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, outputs: Tensor) -> Tensor:
        """Return outputs (B, C) with the value of each added."""
        return outputs + self.value


class TwinModule(MethodModule):
    """Predicts with a shared model, an own head and intercept on top, and the client's own model, a copy at first.

    `share` is the share of the shared model before the weights are learnt. Without `own_head`, there are neither own
    heads nor intercepts.
    """

    log_shares: Tensor
    client_scalars: ClassVar[Mapping[str, str]] = {"shared": "guard.share"}

    def __init__(
        self, body: nn.Module, head: nn.Module, n_outputs: int, share: float, *, own_head: bool = True
    ) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({"body": body, "head": head})
        self.own = copy.deepcopy(self.shared)
        like = next(p for p in self.shared.parameters() if p.requires_grad)
        if own_head and isinstance(head, nn.Linear):  # what it adds to the shared head, nothing at first
            self.own["added"] = nn.Linear(
                head.in_features, n_outputs, head.bias is not None, device=like.device, dtype=like.dtype
            )
            for parameter in self.own["added"].parameters():
                nn.init.zeros_(parameter)
        if own_head:
            self.own["intercept"] = Intercept(like.new_zeros(n_outputs))
        plain = like.new_tensor([0.0, 0.0, 1.0, 0.0, 0.0])
        self.guard = nn.ParameterDict({"share": like.new_full((), share), "parts": plain})
        self.register_buffer("log_shares", like.new_zeros(n_outputs))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return log-probabilities (B, C), logits of labels (B, L) or numbers (B, M) of the mixture.

        In training, return the outputs of each model.
        """
        features = self.shared["body"](x)
        shared, own = self.shared["head"](features), self.own["head"](self.own["body"](x))
        if not self.training:
            return self._mix(features, shared, own)
        outputs = [shared, own]
        if "intercept" in self.own:
            outputs.append(self.own["intercept"](shared.detach()))
        if "added" in self.own:
            outputs.append(shared.detach() + self.own["added"](features.detach()))
        return tuple(outputs)

    def _mix(self, features: Tensor, shared: Tensor, own: Tensor) -> Tensor:
        adapted = shared + self.own["added"](features) if "added" in self.own else shared
        moved = self.own["intercept"](shared) if "intercept" in self.own else shared
        share = self.guard["share"][..., None]
        weights = torch.cat([1 - share, share * self.guard["parts"]], -1)[..., None]
        if shared.shape[1] == 1 or self.kind in ("labels", "numbers"):
            each = torch.stack([own, adapted, moved, shared, shared, shared], 1)
            return mix_labels(each, weights, -2) if self.kind == "labels" else (weights * each).sum(-2)
        each = torch.stack([own, adapted, moved, *(shared + c * self.log_shares for c in CLASS_WEIGHTS)], 1)
        # The logarithm of a mixture of probabilities stays finite where one model is sure.
        return (each.log_softmax(-1) + weights.clamp_min(torch.finfo(each.dtype).tiny).log()).logsumexp(-2)

    def objective(self, output: tuple[Tensor, ...], batch: Batch, loss: LossFunction) -> Tensor:
        """Return the sum of the losses; each trains other parameters."""
        return torch.stack([loss(each, batch) for each in output]).sum()

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the weights' distance from each model alone; on training rows, predictions often agree."""
        share = float(self.guard["share"])
        effects = Effect(SHARED_MODEL, 1 - share), Effect(OWN_MODEL, share)
        if "intercept" not in self.own:
            return effects
        return *effects, Effect(OWN_HEAD, share * float(self.guard["parts"][:2].sum()))


SHARED_MODEL = Mechanism("weights", "the shared model alone", "one without own models")
OWN_HEAD = Mechanism("weights", "those without own heads and intercepts", "one without own heads and intercepts")


@dataclass(frozen=True)
class TwinNetwork(Network):
    """Puts a client's own model beside the shared model.

    Attributes:
        share: share of the shared model before it is learnt.
        classes: whether the shared model's predictions may use the client's class shares.
        own_head: whether a client trains an intercept of its own, and a head of its own on the shared model's features;
            a model without a linear layer at its end has no own head.
    """

    share: float = 0.5
    classes: bool = True
    own_head: bool = True

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        try:
            body, head = split_head(model, x)
        except ModelError:
            body, head = copy.deepcopy(model), nn.Identity()  # type: ignore[assignment]
        with torch.no_grad():
            n_outputs = copy.deepcopy(model).eval()(to_input(x, model)).shape[1]
        return TwinModule(body, head, n_outputs, self.share, own_head=self.own_head)

    def client_buffers(self, label_counts: Tensor) -> Params:
        """Return the logarithm of each client's class shares, relative to equal shares (N, C)."""
        n_classes = label_counts.shape[1]
        if n_classes < 2:  # numbers are predicted
            return Params()
        counts = label_counts + PRIOR_ROWS
        log_shares = (n_classes * counts / counts.sum(1, keepdim=True)).log()
        return Params(log_shares=log_shares if self.classes else torch.zeros_like(log_shares))
