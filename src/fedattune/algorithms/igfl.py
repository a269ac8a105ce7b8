"""IGFL, IGFL-C and IGFL-S. Huang et al., IJCAI 2021, https://arxiv.org/abs/2106.12300.

    client  (IGFL-C, Algorithm 2)   w <- w + dI + dG,   dI = -lr g(w; B),
            dG = (dI - Delta_i / T) / |S| + D / T,   D = w^r - w^(r-1), Delta_i the own last update, T local steps
    server  (IGFL-S, Algorithm 3)   w <- w + (1 / |S|) sum_i sum_j A[i, j] Delta_j,
            A[i, :] = softmax_j <q_i, Delta_j>  (11);   q_i = Delta_i (self), mean_j Delta_j (global), or of the
            update before, Delta'_i (time): T1 as Algorithm 3, T2 as the displayed formula, T3 that formula normalised
IGFL is both; IGFL-C averages on the server, IGFL-S has plain SGD on the clients. Here w^(-1) = w^0, and Delta_i and
Delta'_i are zero before a client's first round.
"""

from ..client import SGD, IndividualAndGroup
from ..core import Algorithm
from ..registry import Fraction
from ..server import Average, Displacement, UpdateAttention
from ..server.average import Weighting
from ..server.update_attention import Query, TimeForm


def igfl(
    *,
    attention: Query = "time",
    time_form: TimeForm = "T3",
    stale_decay: Fraction = 1.0,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """One global model: every local step carries the group's last move, the server weighs updates by attention."""
    return Algorithm(
        SGD((IndividualAndGroup(stale_decay),)),
        Displacement(UpdateAttention(weighting, query=attention, form=time_form)),
        headline="received",
    )


def igfl_c(*, stale_decay: Fraction = 1.0, weighting: Weighting = "uniform") -> Algorithm:
    """One average; every local step also carries the group's last move."""
    return Algorithm(
        SGD((IndividualAndGroup(stale_decay),)), Displacement(Average(weighting)), headline="received"
    )


def igfl_s(
    *, attention: Query = "time", time_form: TimeForm = "T3", weighting: Weighting = "uniform"
) -> Algorithm:
    """One global model, whose updates by the clients are weighted by attention among them."""
    return Algorithm(SGD(), UpdateAttention(weighting, query=attention, form=time_form), headline="received")
