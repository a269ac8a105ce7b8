"""APFL. Deng et al., 2020, https://arxiv.org/abs/2003.13461, Algorithm 1.

client   m = alpha v_i + (1 - alpha) w_i;  w_i <- w_i - lr g(w_i),  v_i <- v_i - lr alpha g(m),
         adaptive: alpha_i <- clip(alpha_i - lr <v_i - w_i, g(m)>, 0, 1)
server   as FedAvg, of w_i
used as  m
"""

from ..client.interpolated import Interpolated
from ..core import Algorithm
from ..registry import Fraction
from ..server import Average
from ..server.average import Weighting


def apfl(*, alpha: Fraction = 0.5, adaptive: bool = False, weighting: Weighting = "samples") -> Algorithm:
    """A mixture of a shared and a personal model, of fixed or learned share."""
    return Algorithm(Interpolated(alpha, adaptive), Average(weighting))
