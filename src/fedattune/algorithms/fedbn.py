"""FedBN.

    @inproceedings{li2021fedbn,
      author = {Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
      title = {{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2021},
      eprint = {2102.07623},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   theta_i <- (w, own BatchNorm), then SGD
    server   w <- sum_k p_k theta_k over the cohort, without the tensors of BatchNorm layers; p_k = 1 / C
    used as  (w, own BatchNorm): scale, shift and running statistics
"""

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.selectors import BatchNorms
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@method(Family.PERSONAL_LAYERS, "one average without BatchNorm", "SGD with personal BatchNorm layers")
def fedbn(*, weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg whose BatchNorm layers never leave the client.

    Source: Li et al. (2021), Algorithm 1.

    Args:
        weighting: weights p_k in the average: `uniform`, as in public code, or by training samples.
    """
    return Algorithm(SGD(), Average(weighting), personal=BatchNorms(), bn_buffers="local", evaluation_point="received")
