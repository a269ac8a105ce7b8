"""FedAvgM. Hsu et al., 2019, https://arxiv.org/abs/1909.06335.

client   theta <- w, then SGD
server   v <- beta v + D,  w <- w + server_lr v,  D = sum_k p_k (theta_k - w), from v = 0

This is the heavy ball, as IGFL (2021) prints it, and not Nesterov's form. The paper gives it in its text, without a
number.
"""

from typing import Annotated

from pydantic import Field

from ..client import SGD
from ..core import Algorithm
from ..registry import Positive
from ..server import HeavyBall
from ..server.average import Weighting


def fedavgm(
    *,
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    server_lr: Positive = 1.0,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg with momentum on the server."""
    return Algorithm(SGD(), HeavyBall(weighting, server_lr, beta), headline="received")
