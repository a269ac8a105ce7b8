"""L2GD. Hanzely and Richtárik, 2020, https://arxiv.org/abs/2002.05516, Algorithm 1.

    minimises  mean_i f_i(x_i) + lam/2 mean_i ||x_i - mean||^2;  one coin for all clients in every iteration:
    1 - p    x_i <- x_i - lr g_i(x_i)            lr = alpha / (n (1 - p))
    p        x_i <- (1 - c) x_i + c mean         c = alpha lam / (n p)

A round is one iteration of the first kind (`--steps 1`; more steps make it several) and then the averagings before the
next one: none with probability 1 - p, m with probability p^m (1 - p). Only rounds with an averaging communicate.
lam = c p / (lr (1 - p)); the paper's best p = lam / (L + lam) with its largest stable alpha gives c = 1/2.
"""

from typing import Annotated

from pydantic import Field

from ..client.contraction import Contraction
from ..core import Algorithm, Participation
from ..registry import Fraction
from ..server.average import Weighting
from ..server.coin import Coin


def l2gd(
    *,
    p: Annotated[float, Field(ge=0, le=0.99)] = 0.2,
    c: Fraction = 0.5,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Every client trains its own model; now and then all are drawn to their mean."""
    return Algorithm(
        Contraction(),
        Coin(weighting, chance=p, c=c),
        participation=Participation(train="all", receive="all"),
        full_participation=True,
    )
