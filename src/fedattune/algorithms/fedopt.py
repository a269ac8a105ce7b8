r"""FedAdam, FedYogi and FedAdagrad.

    @inproceedings{reddi2021adaptive,
      author = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and
        Rush, Keith and Kone{\v{c}}n{\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
      title = {Adaptive Federated Optimization},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2021},
      eprint = {2003.00295},
      archiveprefix = {arXiv}
    }

Algorithm 2:

    client   theta <- w, then SGD
    server   D = sum_k p_k (theta_k - w),  m <- beta1 m + (1 - beta1) D,  w <- w + server_lr m / (sqrt(v) + tau),
             v <- beta2 v + (1 - beta2) D^2              (FedAdam)
                  v - (1 - beta2) D^2 sign(v - D^2)      (FedYogi)
                  v + D^2                                (FedAdagrad)

from m = 0 and v = tau^2, without a correction of the bias towards the start.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.options import Positive
from ..core.params import Params
from ..server.average import Weighting
from ..server.optimizer import ServerOptimizer
from .table import Family, method

SecondMoment = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True)
class AdaptiveOptimizer(ServerOptimizer):
    """Server rule of FedAdam, FedYogi and FedAdagrad; `second` is the rule of the second moment v."""

    second: SecondMoment = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    def init_moments(self, w0: Params) -> dict[str, Params]:
        return {"m": w0.zeros(), "v": w0.map(lambda a: torch.full_like(a, self.tau**2))}

    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        m = self.beta1 * moments["m"] + (1 - self.beta1) * mean
        v = moments["v"].map(self._second, mean)
        return m.map(lambda a, b: a / (b.sqrt() + self.tau), v), {"m": m, "v": v}

    def _second(self, v: Tensor, mean: Tensor) -> Tensor:
        square = mean.square()
        if self.second == "adagrad":
            return v + square
        if self.second == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square


Decay = Annotated[float, Field(ge=0, lt=1)]


@method(Family.GLOBAL, "one model, updated by Adam", "SGD", tune={"server_lr": (0.01, 0.03, 0.1), "tau": (0.001, 0.01)})
def fedadam(
    *,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 0.001,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg with Adam on the server.

    Source: Reddi et al. (2021), Algorithm 2.

    Args:
        server_lr: learning rate eta of the server, in units of the parameters; the paper tunes eta on a grid.
        beta1: decay beta_1 of the first moment m; 0 has no momentum.
        beta2: decay beta_2 of the second moment v.
        tau: adaptivity tau, added to sqrt(v); v starts at tau^2. Updates far below tau take steps without adaptivity.
        weighting: weights p_k in the mean update D: `uniform`, as in the paper's algorithm, or by training samples.
    """
    return Algorithm(
        SGD(), AdaptiveOptimizer(weighting, server_lr, "adam", beta1, beta2, tau), evaluation_point="received"
    )


@method(Family.GLOBAL, "one model, updated by Yogi", "SGD", tune={"server_lr": (0.01, 0.03, 0.1), "tau": (0.001, 0.01)})
def fedyogi(
    *,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 0.001,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg with Yogi on the server.

    Source: Reddi et al. (2021), Algorithm 2. Options: see `fedadam`.
    """
    return Algorithm(
        SGD(), AdaptiveOptimizer(weighting, server_lr, "yogi", beta1, beta2, tau), evaluation_point="received"
    )


@method(Family.GLOBAL, "one model, updated by Adagrad", "SGD", tune={"server_lr": (0.03, 0.1, 0.3)})
def fedadagrad(
    *, server_lr: Positive = 0.1, beta1: Decay = 0.0, tau: Positive = 0.001, weighting: Weighting = "uniform"
) -> Algorithm:
    """FedAvg with Adagrad on the server.

    Source: Reddi et al. (2021), Algorithm 2. Options: see `fedadam`.
    """
    return Algorithm(
        SGD(), AdaptiveOptimizer(weighting, server_lr, "adagrad", beta1, tau=tau), evaluation_point="received"
    )
