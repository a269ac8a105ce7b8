"""FedAdam, FedYogi and FedAdagrad. Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295.

client   theta <- w, then SGD
server   D = sum_k p_k (theta_k - w),  m <- beta1 m + (1 - beta1) D,  w <- w + server_lr m / (sqrt(v) + tau),
         v <- beta2 v + (1 - beta2) D^2              (FedAdam)
              v - (1 - beta2) D^2 sign(v - D^2)      (FedYogi)
              v + D^2                                (FedAdagrad)
from m = 0, v = tau^2 (Algorithm 2). No correction of the bias towards the start.
"""

from typing import Annotated

from pydantic import Field

from ..client import SGD
from ..core import Algorithm
from ..registry import Positive
from ..server import Adaptive
from ..server.average import Weighting

Decay = Annotated[float, Field(ge=0, lt=1)]


def fedadam(
    *,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 0.001,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg whose mean update goes through Adam on the server."""
    return Algorithm(SGD(), Adaptive(weighting, server_lr, "adam", beta1, beta2, tau), headline="received")


def fedyogi(
    *,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 0.001,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg whose mean update goes through Yogi on the server."""
    return Algorithm(SGD(), Adaptive(weighting, server_lr, "yogi", beta1, beta2, tau), headline="received")


def fedadagrad(
    *,
    server_lr: Positive = 0.1,
    beta1: Decay = 0.0,
    tau: Positive = 0.001,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg whose mean update goes through Adagrad on the server."""
    return Algorithm(SGD(), Adaptive(weighting, server_lr, "adagrad", beta1, tau=tau), headline="received")
