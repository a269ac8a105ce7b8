"""FedProx.

    @inproceedings{li2020federated,
      author = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
        Smith, Virginia},
      title = {Federated Optimization in Heterogeneous Networks},
      booktitle = {Proceedings of Machine Learning and Systems (MLSys)},
      year = {2020},
      eprint = {1812.06127},
      archiveprefix = {arXiv}
    }

Algorithm 2:

    client   theta <- theta - lr (g + mu (theta - w)), w fixed for the round: SGD on equation 2
    server   as FedAvg

The paper draws clients by size and averages uniformly. Here, as in FedMCSA's comparison, the cohort is drawn
uniformly and averaged by samples.
"""

from ..client import SGD, Proximal
from ..core.algorithm import Algorithm
from ..core.options import NonNegative
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@method(Family.GLOBAL, "one average", "SGD with a pull to the average", tune={"mu": (0.01, 0.1, 1.0)})
def fedprox(*, mu: NonNegative = 0.1, weighting: Weighting = "samples") -> Algorithm:
    """FedAvg with a proximal term that keeps local training near the global model.

    Source: Li et al. (2020), Algorithm 2 and equation 2.

    Args:
        mu: strength mu of the pull to the received model w; the paper tries 0.001, 0.01, 0.1 and 1. 0 is FedAvg.
        weighting: weights p_k in the average: by training samples, or `uniform`, as in the paper.
    """
    return Algorithm(SGD((Proximal(mu),)), Average(weighting), evaluation_point="received")
