"""LG-FedAvg.

    @misc{liang2020think,
      author = {Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
        Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
      title = {Think Locally, Act Globally: Federated Learning with Local and Global Representations},
      year = {2020},
      eprint = {2001.01523},
      archiveprefix = {arXiv}
    }

Algorithm 1, with the local representation base_k of client k, and the global model g on top of it:

    client   head <- g, then SGD on base_k and head together
    server   g <- sum_k p_k head_k over the cohort, p_k = n_k / sum_j n_j
    used as  (own base, g)

It is FedPer with base and head exchanged.
"""

from dataclasses import dataclass

from ..client import SGD
from ..core.algorithm import Algorithm, Measurable
from ..core.effect import OWN_MODEL, Effect, measure_mixing
from ..core.options import Count
from ..core.payload import MixingMatrices
from ..core.selectors import AllBut, Head
from ..server import Average
from ..server.average import AverageState, Weighting
from .table import Family, method


@dataclass(frozen=True)
class HeadAverage(Average[AverageState], Measurable):
    """Server rule of LG-FedAvg: the average of the heads."""

    def measure_effects(self, state: AverageState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the distance of the average's weights from the client's head alone."""
        return tuple(effect for effect in measure_mixing(mixing) if effect.mechanism == OWN_MODEL)


@method(Family.PERSONAL_LAYERS, "one average of heads", "SGD with a personal base", tune={"layers": (1, 2)})
def lg_fedavg(*, layers: Count = 1, weighting: Weighting = "samples", head: str | None = None) -> Algorithm:
    """Personal bases that learn local representations, and a shared head on top of them, trained together.

    Source: Liang et al. (2020), Algorithm 1.

    Args:
        layers: number of layers in the shared head: a linear layer and the layers before that layer.
        weighting: weights p_k in the average of heads: by training samples, or `uniform`.
        head: name of the linear layer that ends the head; None takes the last linear layer.
    """
    return Algorithm(SGD(), HeadAverage(weighting), personal=AllBut(Head(layers, head)), evaluation_point="received")
