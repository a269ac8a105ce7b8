"""MOCHA. Smith et al., NeurIPS 2017, https://arxiv.org/abs/1705.10467, by gradient steps.

minimises  sum_t f_t(w_t) + lam1 tr(W Omega W^T) + lam2 ||W||_F^2,  W = [w_1 .. w_m]   (equation 1)
client     w_t <- w_t - lr (g(w_t) + 2 lam1 (W Omega)_t + 2 lam2 w_t), the others' models as last uploaded
server     mean     Omega = I - 11^T/m, so that (W Omega)_t = w_t - mean
           learned  Omega = (W^T W)^(-1/2) / tr((W^T W)^(-1/2))
"""

from typing import Literal

from ..client import SGD
from ..client.relation import Relation
from ..core import Algorithm
from ..registry import NonNegative
from ..server.relations import Relations


def mocha(
    *, lam1: NonNegative = 0.5, lam2: NonNegative = 0.0, omega: Literal["mean", "learned"] = "mean"
) -> Algorithm:
    """Every client has a model of its own; a regulariser ties them by a matrix, given or learned."""
    return Algorithm(SGD((Relation(lam1, lam2),), start="own"), Relations(omega))
