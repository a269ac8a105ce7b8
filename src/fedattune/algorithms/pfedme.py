"""pFedMe. Dinh et al., NeurIPS 2020, https://arxiv.org/abs/2006.08848, Algorithm 1.

client   K times theta <- theta - personal_lr (g(theta) + lam (theta - w_i)) on one batch,
then w_i <- w_i - lr lam (w_i - theta); all clients train, the cohort uploads w_i
server   w <- (1 - beta) w + beta sum_k p_k w_k, sent to all
used as  theta (the paper's PM, `trained`); w itself is its GM (`received`)
"""

from ..client import Moreau
from ..core import Algorithm, Participation
from ..registry import Count, NonNegative, Positive
from ..server import Average
from ..server.average import Weighting


def pfedme(
    *,
    lam: NonNegative = 15.0,
    K: Count = 5,
    personal_lr: Positive = 0.05,
    beta: NonNegative = 1.0,
    weighting: Weighting = "samples",
) -> Algorithm:
    """Personal models by Moreau envelopes around one global model."""
    return Algorithm(
        Moreau(lam, K, personal_lr),
        Average(weighting, beta),
        participation=Participation(train="all", receive="all"),
    )
