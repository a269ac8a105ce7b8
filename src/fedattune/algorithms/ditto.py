"""Ditto. Li et al., ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1.

client   w_i <- w, then SGD;  v_i <- v_i - lr (g(v_i) + lam (v_i - w)), w as received, on the same batches
server   as FedAvg, of w_i
used as  v_i
"""

from ..client.ditto import Ditto
from ..core import Algorithm
from ..registry import NonNegative, Positive
from ..server import Average
from ..server.average import Weighting


def ditto(
    *, lam: NonNegative = 1.0, personal_lr: Positive | None = None, weighting: Weighting = "samples"
) -> Algorithm:
    """A personal model held near the global one, which is trained as if there were no personal ones.

    `personal_lr` is the run's learning rate unless given.
    """
    return Algorithm(Ditto(lam, personal_lr), Average(weighting))
