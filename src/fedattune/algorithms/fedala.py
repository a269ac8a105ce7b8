"""FedALA. Zhang et al., AAAI 2023, https://arxiv.org/abs/2212.01197, Algorithm 1.

client   theta_i <- theta_i^old + (w - theta_i^old) * U_i in the upper layers, w below; then SGD; uploads theta_i
         before, on a share of the samples:  U_i <- clip(U_i - eta g(theta_i) * (w - theta_i^old), 0, 1)
server   as FedAvg
"""

from typing import Annotated

from pydantic import Field

from ..client.local_aggregation import LocalAggregation
from ..core import Algorithm
from ..registry import Count, NonNegative
from ..server import Average
from ..server.average import Weighting


def fedala(
    *,
    layers: Count = 1,
    eta: NonNegative = 1.0,
    share: Annotated[float, Field(gt=0, le=1)] = 0.8,
    first_passes: Count = 11,
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg whose clients learn, value by value, how much of the new upper layers to take over."""
    return Algorithm(
        LocalAggregation(layers, eta, share, first_passes), Average(weighting), headline="received"
    )
