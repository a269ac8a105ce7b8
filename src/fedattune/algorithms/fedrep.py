"""FedRep. Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078, Algorithm 1.

client   base <- w; head_epochs times the round's work on the head, then base_epochs times on the base
server   w <- sum_k p_k base_k over the cohort, p_k = n_k / sum_j n_j
used as  (w, own head)
"""

from typing import Annotated

from pydantic import Field

from ..client import Alternating
from ..core import Algorithm
from ..registry import Count, NonNegative
from ..select import Head
from ..server import Average
from ..server.average import Weighting


def fedrep(
    *,
    head_epochs: Count = 10,
    base_epochs: Count = 1,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    weight_decay: NonNegative | None = None,
    weighting: Weighting = "samples",
    head: str | None = None,
) -> Algorithm:
    """A shared base under personal heads, trained in turn: first the head, then the base.

    `head` names the linear layer that is the head; it is the last one unless given.
    """
    return Algorithm(
        Alternating(head_epochs, base_epochs, momentum),
        Average(weighting),
        personal=Head(1, head),
        headline="received",
        weight_decay=weight_decay,
        default_weight_decay=1e-4,
    )
