"""FedAvgM. The paper gives the method in its text, without an equation number.

    @misc{hsu2019measuring,
      author = {Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew},
      title = {Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
      year = {2019},
      eprint = {1909.06335},
      archiveprefix = {arXiv}
    }

Rules:

    client   theta <- w, then SGD
    server   v <- beta v + D,  w <- w + server_lr v,  D = sum_k p_k (theta_k - w), from v = 0

This is the heavy ball, as IGFL's paper prints it. Some later code uses Nesterov's form.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..client import SGD
from ..core.algorithm import Algorithm
from ..core.options import Positive
from ..core.params import Params
from ..server.average import Weighting
from ..server.optimizer import ServerOptimizer
from .table import Family, method


@dataclass(frozen=True)
class HeavyBall(ServerOptimizer):
    """Server rule of FedAvgM: v <- beta v + D, w <- w + server_lr v, from v = 0."""

    beta: float = 0.9

    def init_moments(self, w0: Params) -> dict[str, Params]:
        return {"v": w0.zeros()}

    def direction(self, mean: Params, moments: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        v = self.beta * moments["v"] + mean
        return v, {"v": v}


@method(Family.GLOBAL, "one average with momentum", "SGD", tune={"beta": (0.5, 0.9), "server_lr": (0.3, 1.0)})
def fedavgm(
    *, beta: Annotated[float, Field(ge=0, lt=1)] = 0.9, server_lr: Positive = 1.0, weighting: Weighting = "uniform"
) -> Algorithm:
    """FedAvg with momentum on the server.

    Source: Hsu, Qi and Brown (2019), in the text.

    Args:
        beta: momentum beta of the server: v <- beta v + D.
        server_lr: factor of v in the step of the server; 1 with beta = 0 is FedAvg.
        weighting: weights p_k in the mean update D: `uniform`, as in IGFL's comparison, or by training samples.
    """
    return Algorithm(SGD(), HeavyBall(weighting, server_lr, beta), evaluation_point="received")
