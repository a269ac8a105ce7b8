"""FedProx. Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127, Algorithm 2.

client   theta <- theta - lr (g + mu (theta - w)), w fixed for the round: SGD on (2)
server   as FedAvg (the paper samples clients by size and averages uniformly; here, as in FedMCSA's comparison,
the cohort is drawn uniformly and weighted by samples)
"""

from ..client import SGD, Proximal
from ..core.algorithm import Algorithm
from ..core.options import NonNegative
from ..server import Average
from ..server.average import Weighting
from .table import Family, method

PAPER = r"""
@inproceedings{li2020federated,
  author = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
    Smith, Virginia},
  title = {Federated Optimization in Heterogeneous Networks},
  booktitle = {Proceedings of Machine Learning and Systems (MLSys)},
  year = {2020},
  eprint = {1812.06127},
  archiveprefix = {arXiv}
}
"""


@method(PAPER, family=Family.GLOBAL, server="one average", client="SGD with a pull to the average")
def fedprox(*, mu: NonNegative = 0.01, weighting: Weighting = "samples") -> Algorithm:
    """FedAvg with a proximal term that holds local training near the global model."""
    return Algorithm(SGD((Proximal(mu),)), Average(weighting), headline="received")
