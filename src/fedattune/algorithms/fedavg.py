r"""FedAvg.

    @inproceedings{mcmahan2017communication,
      author = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
        {Ag{\"u}era y Arcas}, Blaise},
      title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
      booktitle = {International Conference on Artificial Intelligence and Statistics (AISTATS)},
      year = {2017},
      eprint = {1602.05629},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   theta <- w, then SGD
    server   w <- sum_k p_k theta_k over the cohort, p_k = n_k / sum_j n_j
"""

from ..client import SGD
from ..core.algorithm import Algorithm, FineTune
from ..core.options import Count, Positive
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@method(Family.GLOBAL, "one average", "SGD")
def fedavg(*, weighting: Weighting = "samples") -> Algorithm:
    """One global model: the mean of the cohort's models, weighted by samples."""
    return Algorithm(SGD(), Average(weighting), headline="received")


@method(Family.ADAPTED, "one average", "SGD; fine-tunes the average before use")
def fedavg_ft(
    *, weighting: Weighting = "samples", ft_steps: Count | None = None, ft_lr: Positive | None = None
) -> Algorithm:
    """FedAvg; every client fine-tunes the global model on its own data before use.

    By default, `ft_steps` and `ft_lr` are the round's local work and learning rate.
    """
    return Algorithm(SGD(), Average(weighting), adapt=FineTune(ft_steps, ft_lr))
