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
    """One global model: the mean of the cohort's models, weighted by samples.

    Source: McMahan et al. (2017), Algorithm 1.

    Args:
        weighting: weights p_k in the mean: proportional to the training samples n_k, or `uniform`: 1 / cohort size.
    """
    return Algorithm(SGD(), Average(weighting), evaluation_point="received")


@method(Family.ADAPTED, "one average", "SGD; fine-tunes the average before use")
def fedavg_ft(
    *, weighting: Weighting = "samples", ft_steps: Count | None = None, ft_lr: Positive | None = None
) -> Algorithm:
    """FedAvg; every client fine-tunes the global model on its own data before use.

    Only evaluations fine-tune; training is the same as in `fedavg`.

    Args:
        weighting: weights p_k in the mean; see `fedavg`.
        ft_steps: mini-batch steps of fine-tuning; None repeats the run's local work, in steps or epochs.
        ft_lr: learning rate of fine-tuning; None takes the run's learning rate.
    """
    return Algorithm(SGD(), Average(weighting), fine_tune=FineTune(ft_steps, ft_lr))
