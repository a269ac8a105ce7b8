"""FedFomo. Zhang et al., ICLR 2021, https://arxiv.org/abs/2012.08565, section 3.

server   sends client i the last uploads theta_n of `models` - 1 others: with probability epsilon any,
         otherwise those with the largest P[i, n]; epsilon falls by epsilon_decay in every round
client   a_n = (L_i(theta_i) - L_i(theta_n)) / ||theta_n - theta_i|| on held-out data,
         w_n = max(a_n, 0) / sum_m max(a_m, 0),  theta_i <- theta_i + sum_n w_n (theta_n - theta_i), then SGD
server   P[i, n] <- P[i, n] + a_n
used as  theta_i before SGD
theta_i on the right is what client i started its last SGD from; what that SGD ended with is a candidate of its own.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..client import Choosing
from ..core import Algorithm
from ..registry import Fraction
from ..server import Peers


def fedfomo(
    *,
    models: Annotated[int, Field(ge=2, le=1_000_000)] = 5,
    epsilon: Fraction = 0.3,
    epsilon_decay: Fraction = 0.05,
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    fallback: Literal["own", "previous"] = "own",
    affinity: Literal["raw", "normalised"] = "raw",
) -> Algorithm:
    """Clients are sent models of others and take what is better than theirs on held-out data."""
    return Algorithm(
        Choosing(validation, fallback, affinity),
        Peers(models, epsilon, epsilon_decay),
        headline="received",
    )
