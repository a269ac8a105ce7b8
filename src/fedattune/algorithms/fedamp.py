"""FedAMP and HeurFedAMP. Huang et al., AAAI 2021, https://arxiv.org/abs/2007.03797, Algorithm 1.

    FedAMP      xi_ij = alpha exp(-||theta_i - theta_j||^2 / sigma) / sigma,  xi_ii = 1 - sum_j xi_ij
    HeurFedAMP  xi_ij = (1 - xi_ii) softmax_j(sigma cos(theta_i, theta_j)),  xi_ii = self_weight
    server      u_i = sum_j xi_ij theta_j over the cohort
    client      theta_i <- theta_i - lr (g + prox (theta_i - u_i)), from u_i; prox = lam / alpha, resp. lam
The papers' clients all take part; with a smaller cohort the others go on training towards their last u_i.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..client import SGD, Proximal
from ..core import Algorithm, Participation
from ..registry import NonNegative, Positive
from ..select import Unit
from ..server import AMP, HeurAMP

_EVERYBODY_TRAINS = Participation(train="all", receive="reply")


def fedamp(
    *, alpha: Positive = 1.0, sigma: Positive = 1.0, lam: NonNegative = 1.0, unit: Unit = "model"
) -> Algorithm:
    """Attentive message passing: clients whose models are near attract each other."""
    return Algorithm(
        SGD((Proximal(lam / alpha),), start="newest"),
        AMP(unit, alpha=alpha, sigma=sigma),
        participation=_EVERYBODY_TRAINS,
    )


def heurfedamp(
    *,
    sigma: NonNegative = 25.0,
    self_weight: Annotated[float, Field(ge=0, le=1)] | Literal["attention"] = 0.5,
    lam: NonNegative = 1.0,
    unit: Unit = "model",
) -> Algorithm:
    """Message passing by cosine, with a fixed share for the own model.

    The paper's share is 1/(M+1) for M other clients of the same distribution, which nobody knows beforehand:
    0.5 is M = 1. `self_weight="attention"` puts the own model into the softmax.
    """
    share = None if self_weight == "attention" else self_weight
    return Algorithm(
        SGD((Proximal(lam),), start="newest"),
        HeurAMP(unit, sigma=sigma, self_weight=share),
        participation=_EVERYBODY_TRAINS,
    )
