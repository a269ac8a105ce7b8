"""FedRep.

    @inproceedings{collins2021exploiting,
      author = {Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
      title = {Exploiting Shared Representations for Personalized Federated Learning},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2021},
      eprint = {2102.07078},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   base <- w; head_epochs times the round's work on the head, then base_epochs times on the base
    server   w <- sum_k p_k base_k over the cohort, p_k = n_k / sum_j n_j
    used as  (w, own head)
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..client import PartTraining
from ..core.algorithm import Algorithm, ClientUpdate, Finished, LocalPlan
from ..core.options import Count, NonNegative
from ..core.params import Params
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..core.selectors import Head
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    velocity: Params
    t: Tensor


@dataclass(frozen=True)
class FedRepClient(ClientUpdate, PartTraining):
    """Client rule of FedRep: trains the personal part, then the shared part; the other part stays exactly the same.

    `personal` and `shared` are repetitions of the round's local work on each; momentum starts from zero in every round.
    """

    personal: int
    shared: int
    momentum: float = 0.0

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(passes=self.personal + self.shared)

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        return _Carry(sent.params, sent.params.zeros(), torch.zeros_like(context.n_steps))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        w, velocity, t = carry
        first = t * self.plan.passes < context.n_steps * self.personal
        v = self.momentum * velocity + grad(w, batch)
        moves = Params({k: first if k in context.personal_names else ~first for k in w})
        velocity = moves.map(torch.where, v, velocity)
        return _Carry(moves.map(torch.where, w - context.lr * v, w), velocity, t + 1)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return Payload(carry.w), local_state


@method(
    Family.PERSONAL_LAYERS,
    "one average of bases",
    "SGD on its personal head, then on the base",
    tune={"head_epochs": (1, 5, 10)},
)
def fedrep(
    *,
    head_epochs: Count = 10,
    base_epochs: Count = 1,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    weight_decay: NonNegative | None = None,
    weighting: Weighting = "samples",
    head: str | None = None,
) -> Algorithm:
    """A shared base and personal heads, trained in turn: first the head, then the base.

    Source: Collins et al. (2021), Algorithm 1.

    Args:
        head_epochs: repetitions of the round's local work (its steps or epochs) on the head, with the base frozen.
        base_epochs: repetitions of the round's local work on the base, with the head frozen.
        momentum: momentum of SGD, from zero in every round.
        weight_decay: l2 coefficient; None takes the run's coefficient if there is one, else 1e-4, as in public code.
        weighting: weights p_k in the average: by training samples, as in public code, or `uniform`, as in the paper.
        head: name of the linear layer that is the head; None takes the last linear layer.
    """
    return Algorithm(
        FedRepClient(head_epochs, base_epochs, momentum),
        Average(weighting),
        personal=Head(1, head),
        evaluation_point="received",
        weight_decay=weight_decay,
        default_weight_decay=1e-4,
    )
