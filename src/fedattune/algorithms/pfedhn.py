"""pFedHN. Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628, Algorithm 1.

server   theta_i = h(v_i; phi)
client   theta~_i <- theta_i, then SGD with momentum, gradients clipped to a length
server   (phi, v_i) <- optimizer step with the gradient (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)
used as  theta_i
The paper has one client per round: `--cohort 1`. With more, all models of a round are generated at its start, and the
server's steps follow client after client, each with the theta_i of the phi of the moment.
"""

from typing import Annotated

from pydantic import Field

from ..client import SGD
from ..core import Algorithm
from ..registry import Count, NonNegative, Positive
from ..server import Generated


def pfedhn(
    *,
    embedding: Count | None = None,
    hidden: Count = 100,
    depth: Annotated[int, Field(ge=0, le=100)] = 3,
    hn_lr: Positive = 1e-2,
    hn_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    hn_weight_decay: NonNegative = 1e-3,
    hn_clip: Positive = 50.0,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    clip: Positive = 50.0,
    weight_decay: NonNegative | None = None,
) -> Algorithm:
    """One hypernetwork generates every client's model from an embedding of the client.

    `hn_...` are of the server's optimizer, the others of the client's.
    """
    return Algorithm(
        SGD(momentum=momentum, clip=clip),
        Generated(embedding, hidden, depth, hn_lr, hn_momentum, hn_weight_decay, hn_clip),
        headline="received",
        weight_decay=weight_decay,
        default_weight_decay=5e-5,
    )
