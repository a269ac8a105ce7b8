"""FedExP.

    @inproceedings{jhunjhunwala2023fedexp,
      author = {Jhunjhunwala, Divyansh and Wang, Shiqiang and Joshi, Gauri},
      title = {{FedExP}: Speeding Up Federated Averaging via Extrapolation},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2023},
      eprint = {2301.09604},
      archiveprefix = {arXiv}
    }

Rules, with the updates D_k = theta_k - w of M clients and their mean D:

    client   theta_k <- w, then SGD
    server   eta = max(1, sum_k ||D_k||^2 / (2 M (||D||^2 + eps))),  w <- w + eta D

D is short beside the D_k where clients pull in different directions: then the server takes a longer step than FedAvg,
as the extrapolated projection onto convex sets does.
"""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..client import SGD
from ..core.algorithm import Algorithm, Measurable, ServerUpdate
from ..core.effect import Effect, Mechanism
from ..core.options import NonNegative
from ..core.params import Params, squared_norm
from ..core.payload import MixingMatrices, Payload
from ..server.average import Weighting, client_weights, mean_update
from ..server.products import flatten
from .table import Family, method

EXTRAPOLATION = Mechanism("updates", "the clients' mean updates", "FedAvg")

SMALLEST_SQUARE = 1e-30
"""Squared norm of an update that counts as zero, so that eps = 0 does not divide by zero."""


class ExtrapolationState(TypedDict):
    """The global model, and the step size eta of the last round."""

    w: Params
    eta: Tensor


@dataclass(frozen=True)
class Extrapolation(ServerUpdate[ExtrapolationState], Measurable):
    """Server rule of FedExP: w <- w + eta D, eta = max(1, sum_k p_k ||D_k||^2 / (2 (||D||^2 + eps))).

    It needs the norm of every single update, so it states no sums.
    """

    weighting: Weighting = "uniform"
    eps: float = 0.001

    def init(self, w0: Params, n_clients: int) -> ExtrapolationState:
        return {"w": w0, "eta": torch.ones((), dtype=torch.float64)}

    def aggregate(
        self, state: ExtrapolationState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ExtrapolationState:
        p = client_weights(n, self.weighting)
        mean = mean_update(p, sent.params, uploads.params)
        each = uploads.params.map(lambda a, b: flatten(a - b).square().sum(1).double(), sent.params)
        norms = sum(each.values(), torch.zeros_like(p))
        whole = (squared_norm(mean).double() + self.eps).clamp_min(SMALLEST_SQUARE)
        eta = ((p * norms).sum() / (2 * whole)).clamp_min(1.0)
        return {"w": state["w"].map(lambda a, b: a + eta.to(a.dtype) * b, mean), "eta": eta.cpu()}

    def measure_effects(self, state: ExtrapolationState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the change of the mean update: ||eta D - D|| / ||D|| = eta - 1."""
        return (Effect(EXTRAPOLATION, float(state["eta"]) - 1),)


@method(
    Family.GLOBAL, "one average, with a step beyond it where updates differ", "SGD", tune={"eps": (0.001, 0.01, 0.1)}
)
def fedexp(*, eps: NonNegative = 0.001, weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg whose server takes longer steps where the clients' updates point in different directions.

    Source: Jhunjhunwala et al. (2023), the step size of FedExP.

    Args:
        eps: eps in the denominator, in units of a squared update; a large value has eta = 1, which is FedAvg. The paper
            tunes it.
        weighting: weights p_k in D and in the mean of the squared norms: `uniform`, as in the paper, or by training
            samples.
    """
    return Algorithm(SGD(), Extrapolation(weighting, eps), evaluation_point="received")
