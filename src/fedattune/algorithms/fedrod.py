"""FedRoD.

    @inproceedings{chen2022bridging,
      author = {Chen, Hong-You and Chao, Wei-Lun},
      title = {On Bridging Generic and Personalized Federated Learning for Image Classification},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2022},
      eprint = {2107.00778},
      archiveprefix = {arXiv}
    }

Rules:

    client   f = E(x);  SGD of E and G on CE(G(f) + log n_i, y), n_i the client's class counts (balanced softmax);
             SGD of P_i on CE(sg(G(f)) + P_i(sg(f)), y), on the same batch
    server   E, G <- sum_k p_k (E_k, G_k);  P_i stays on its client
    used as  G(f) + P_i(f);  G(f) alone is the generic model
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.params import Params
from ..core.payload import Batch
from ..core.selectors import NamedParameters
from ..server.average import PartAverage, Weighting
from .table import Family, method


class TwoHeadModule(MethodModule):
    """Predicts head(f) + personal_head(f), f = body(x); in training, the personal head gets detached features.

    The personal head starts as a copy of the user's head, or at zero.
    """

    counts: Tensor

    def __init__(self, body: nn.Module, head: nn.Linear, zeros: bool) -> None:
        super().__init__()
        self.body, self.head, self.personal_head = body, head, copy.deepcopy(head)
        self.register_buffer("counts", head.weight.new_ones(head.out_features))
        if zeros:
            for parameter in self.personal_head.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return logits (B, C); in training, the logits of both heads and the log class counts (C,)."""
        features = self.body(x)
        generic = self.head(features)
        if not self.training:
            return generic + self.personal_head(features)  # type: ignore[no-any-return]
        # -1e9 gives a class without samples probability 0, and stays finite for padding, which has weight 0.
        log_counts = torch.where(self.counts > 0, self.counts.log(), -1e9)
        return generic, self.personal_head(features.detach()), log_counts

    def objective(self, output: tuple[Tensor, Tensor, Tensor], batch: Batch, loss: LossFunction) -> Tensor:
        """Return the balanced loss of the generic head plus the loss of both heads for the personal one."""
        generic, own, log_counts = output
        return loss(generic + log_counts, batch) + loss(generic.detach() + own, batch)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        features = self.body(x)
        generic, own = (_centre(head(features)) for head in (self.head, self.personal_head))
        return (Effect(PERSONAL_HEAD, float(own.norm() / generic.norm().clamp_min(1e-30))),)


def _centre(logits: Tensor) -> Tensor:
    return logits - logits.mean(1, keepdim=True)


PERSONAL_HEAD = Mechanism("predictions", "predictions of the generic head", "one without personal heads")


@dataclass(frozen=True)
class FedRoDNetwork(Network):
    """Adds a personal head, a copy of the head or zero."""

    zeros: bool = False

    generic = True  # without its personal head, the module is the generic model
    class_need = "FedRoD's balanced softmax counts the samples of each class"
    balance = "FedRoD's balanced softmax"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return TwoHeadModule(*split_head(model, x), self.zeros)

    def client_buffers(self, label_counts: Tensor) -> Params:
        return Params(counts=label_counts)


@method(Family.TWO_HEADS, "one average", "SGD on a balanced softmax; adds a personal head")
def fedrod(*, personal_init: Literal["generic", "zeros"] = "generic", weighting: Weighting = "samples") -> Algorithm:
    """A generic head, trained on a balanced loss, and a personal head on top of it.

    Source: Chen and Chao (2022).

    Args:
        personal_init: start of P_i: a copy of the `generic` head G, or `zeros`, so that the first prediction is G's.
        weighting: weights p_k in the average of E and G: by training samples, or `uniform`.
    """
    zeros = personal_init == "zeros"
    return Algorithm(
        SGD(),
        PartAverage(weighting, copies=() if zeros else (("personal_head", "head"),)),
        personal=NamedParameters(("personal_head",)),
        network=FedRoDNetwork(zeros),
        evaluation_point="received",
    )
