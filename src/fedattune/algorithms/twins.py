"""Networks of two models for each client: a shared model, and the client's own model beside it; see `attune`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.effect import OWN_MODEL, Effect, Mechanism
from ..core.network import MethodModule, Network
from ..core.params import Params
from ..core.payload import Batch
from ..core.task import compute_loss

PRIOR_ROWS = 0.5
"""Rows that are added to the training rows of each class: no class is impossible."""

GUARD = ("guard.share", "guard.classes")
"""Names of the two weights s and c among the parameters of a `TwinModule`."""


def set_guards(w: Params, shares: Sequence[float], classes: Sequence[float]) -> Params:
    """Return the model with E pairs of weights s and c; it predicts for each pair: (E, B, outputs)."""
    like = w[GUARD[0]]
    values = (like.new_tensor(pairs)[:, None, None] for pairs in (shares, classes))
    return Params({**w, **dict(zip(GUARD, values, strict=True))})


class TwinModule(MethodModule):
    """Predicts with a shared model and a client's own model, a copy of it at first.

    `share` is the share of the shared model before it is learnt.
    """

    log_shares: Tensor
    client_scalars: ClassVar[Mapping[str, str]] = {"shared": "guard.share", "classes": "guard.classes"}

    def __init__(self, model: nn.Module, n_outputs: int, share: float) -> None:
        super().__init__()
        self.shared, self.own = model, copy.deepcopy(model)
        like = next(p for p in model.parameters() if p.requires_grad)
        self.guard = nn.ParameterDict({"share": like.new_full((), share), "classes": like.new_zeros(())})
        self.register_buffer("log_shares", like.new_zeros(n_outputs))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probabilities (B, C) or numbers (B, 1) of the mixture; in training, the outputs of both models."""
        shared, own = self.shared(x), self.own(x)
        if self.training:
            return shared, own
        share = self.guard["share"]
        if shared.shape[1] == 1:
            return share * shared + (1 - share) * own  # type: ignore[no-any-return]
        return self._mix(shared + self.guard["classes"] * self.log_shares, own, share)

    @staticmethod
    def _mix(shared: Tensor, own: Tensor, share: Tensor) -> Tensor:
        """Return the logarithm of a mixture of probabilities, finite also where one model is sure."""
        tiny = torch.finfo(share.dtype).tiny
        parts = (
            shared.log_softmax(-1) + share.clamp_min(tiny).log(),
            own.log_softmax(-1) + (1 - share).clamp_min(tiny).log(),
        )
        return torch.stack(parts).logsumexp(0)

    def objective(self, output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Return the sum of the losses of both models, which share no parameter."""
        shared, own = output
        return compute_loss(shared, batch) + compute_loss(own, batch)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the weights' distance from each model alone; on training rows, predictions often agree."""
        share = float(self.guard["share"])
        return Effect(SHARED_MODEL, 1 - share), Effect(OWN_MODEL, share)


SHARED_MODEL = Mechanism("weights", "the shared model alone", "one without own models")


@dataclass(frozen=True)
class TwinNetwork(Network):
    """Puts a client's own model beside the shared model.

    Attributes:
        share: share of the shared model before it is learnt.
        classes: whether the shared model's predictions may use the client's class shares.
    """

    share: float = 0.5
    classes: bool = True

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        with torch.no_grad():
            n_outputs = copy.deepcopy(model).eval()(x.to(next(model.parameters()))).shape[1]
        return TwinModule(copy.deepcopy(model), n_outputs, self.share)

    def client_buffers(self, label_counts: Tensor) -> Params:
        """Return the logarithm of each client's class shares, relative to equal shares (N, C)."""
        n_classes = label_counts.shape[1]
        if n_classes < 2:  # numbers are predicted
            return Params()
        counts = label_counts + PRIOR_ROWS
        log_shares = (n_classes * counts / counts.sum(1, keepdim=True)).log()
        return Params(log_shares=log_shares if self.classes else torch.zeros_like(log_shares))
