"""pFedLA and HeurpFedLA. Ma et al., CVPR 2022, https://arxiv.org/abs/2205.03993.

server   theta_bar_i,l = sum_k alpha_i^l[k] theta_k,l for every layer l, alpha_i = HN_i(v_i; psi_i);
         HeurpFedLA: of the k layers with the largest alpha_i^l[i], theta_bar_i,l = theta_i,l
client   theta_i <- theta_bar_i, then SGD
server   G_i = theta_bar_i - theta_i,  dL/d(v_i, psi_i) = (d theta_bar_i / d(v_i, psi_i))^T G_i,
         v_i <- v_i - hn_lr dL/dv_i,  psi_i <- psi_i - hn_lr dL/dpsi_i
used as  theta_bar_i
Written from a text of the paper without formulas, so there are no numbers of equations; it leaves the hypernetwork
open. Here, as in public code: v_i of 100, three linear layers of 100 with ReLU, one linear head per layer of the model.
Public code takes -G_i, which goes uphill, and `relu_sum`.
"""

from typing import Annotated

from pydantic import Field

from ..client import SGD, Retaining
from ..core import Algorithm
from ..registry import Count, Positive
from ..select import Unit
from ..server import Learned, Retained
from ..server.learned import Norm


def pfedla(
    *,
    hn_lr: Positive = 5e-3,
    embedding: Count = 100,
    hidden: Count = 100,
    norm: Norm = "softmax",
    unit: Unit = "layer",
) -> Algorithm:
    """Every layer of a client's model is mixed by weights that its own hypernetwork learns."""
    return Algorithm(SGD(), Learned(unit, hn_lr, embedding, hidden, norm), headline="received")


def heurpfedla(
    *,
    retain: Annotated[int, Field(ge=0, le=1_000_000)] = 1,
    upload_retained: bool = True,
    hn_lr: Positive = 5e-3,
    embedding: Count = 100,
    hidden: Count = 100,
    norm: Norm = "softmax",
    unit: Unit = "layer",
) -> Algorithm:
    """Learned mixing as in pFedLA; clients keep, and need not be sent, the layers that are mostly their own."""
    return Algorithm(
        Retaining(unit=unit),
        Retained(unit, hn_lr, embedding, hidden, norm, retain, upload_retained),
        headline="received",
    )
