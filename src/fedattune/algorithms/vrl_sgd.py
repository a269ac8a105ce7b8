"""VRL-SGD. Liang et al., 2019, https://arxiv.org/abs/1912.12844.

client   x_i <- x_i - lr (g(x_i) - D_i), k steps;  then, when the mean xhat comes back,
         D_i <- D_i + (xhat - x_i) / (k lr),  x_i <- xhat                                 (Algorithm 1)
server   xhat <- mean_i x_i over all clients
Defined for rounds in which all clients take part: then sum_i D_i = 0. With warm-up the first round has k = 1.
"""

from ..client import SGD, VarianceReduced
from ..core import Algorithm
from ..server import Average
from ..server.average import Weighting


def vrl_sgd(*, warmup: bool = False, weighting: Weighting = "uniform") -> Algorithm:
    """One average; clients take out of their gradients what sets them apart from the mean."""
    return Algorithm(
        SGD((VarianceReduced(warmup),)), Average(weighting), headline="received", full_participation=True
    )
