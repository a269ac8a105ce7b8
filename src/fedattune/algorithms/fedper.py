"""FedPer.

    @misc{arivazhagan2019federated,
      author = {Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
      title = {Federated Learning with Personalization Layers},
      year = {2019},
      eprint = {1912.00818},
      archiveprefix = {arXiv}
    }

Algorithms 1 and 2:

    client   base <- w, then SGD on base and head together
    server   w <- sum_k p_k base_k over the cohort, p_k = n_k / sum_j n_j
    used as  (w, own head)
"""

from typing import Annotated

from pydantic import Field

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.selectors import Head
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@method(Family.PERSONAL_LAYERS, "one average of bases", "SGD with a personal head")
def fedper(
    *, layers: Annotated[int, Field(ge=0, le=1_000_000)] = 1, weighting: Weighting = "samples", head: str | None = None
) -> Algorithm:
    """A shared base and personal heads, trained together.

    Source: Arivazhagan et al. (2019), Algorithms 1 and 2.

    Args:
        layers: number K_P of layers in the head: a linear layer and the layers before that layer. 0 is FedAvg.
        weighting: weights p_k in the average: by training samples, or `uniform`.
        head: name of the linear layer that ends the head; None takes the last linear layer.
    """
    return Algorithm(SGD(), Average(weighting), personal=Head(layers, head), evaluation_point="received")
