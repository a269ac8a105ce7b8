"""FedBABU.

    @inproceedings{oh2022fedbabu,
      author = {Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young},
      title = {{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2022},
      eprint = {2106.06042},
      archiveprefix = {arXiv}
    }

Algorithm 1, with the body w and the head h0, which is drawn once for all clients and stays as it is in training:

    client   body <- w, then SGD on the body of (body, h0)
    server   w <- sum_k p_k body_k over the cohort, p_k = n_k / sum_j n_j
    used as  (w, h0) after fine-tuning of the head, or of head and body, by each client; training never sees the result
"""

from dataclasses import dataclass
from typing import Literal

from ..client import PartCarry, PartSGD
from ..core.algorithm import Algorithm, FineTune, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.options import Count, Positive
from ..core.params import squared_norm
from ..core.payload import Batch, Grad, RoundContext
from ..core.selectors import Head
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@dataclass(frozen=True)
class BodySGD(PartSGD, StepMeasuring):
    """Client rule of FedBABU: SGD on the body; the head stays at its initial values."""

    mechanisms = (Mechanism("steps", "steps that train the head too", "FedAvg with fine-tuning"),)

    def measure_step(self, carry: PartCarry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        g = grad(carry.w, batch, statistics=False)
        return ((squared_norm(g.only(self.select_frozen(g, context))), squared_norm(g)),)


@method(
    Family.ADAPTED,
    "one average of bodies",
    "SGD on the body, with the initial head; fine-tunes the head before use",
    tune={"tuned": ("head", "all")},
)
def fedbabu(
    *,
    tuned: Literal["head", "all"] = "head",
    ft_steps: Count | None = None,
    ft_lr: Positive | None = None,
    weighting: Weighting = "samples",
    head: str | None = None,
) -> Algorithm:
    """A shared body, trained under a head that never changes; every client then fine-tunes a head before use.

    Source: Oh, Kim and Yun (2022), Algorithm 1.

    Args:
        tuned: what fine-tuning trains: the `head`, or `all`: the head and the body.
        ft_steps: mini-batch steps of fine-tuning; None repeats the run's local work, in steps or epochs.
        ft_lr: learning rate of fine-tuning; None takes a tenth of the run's rate, since features grow large under a
            head that stays small.
        weighting: weights p_k in the average: by training samples, or `uniform`.
        head: name of the linear layer that is the head; None takes the last linear layer.
    """
    return Algorithm(
        BodySGD(),
        Average(weighting),
        personal=Head(1, head),
        fine_tune=FineTune(ft_steps, ft_lr, tensors="personal" if tuned == "head" else "all", share=0.1),
    )
