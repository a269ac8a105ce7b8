"""FedRoD. Chen and Chao, ICLR 2022, https://arxiv.org/abs/2107.00778.

client   f = E(x);  SGD of E and G on CE(G(f) + log n_i, y), n_i the client's class counts (balanced softmax);
         SGD of P_i on CE(sg(G(f)) + P_i(sg(f)), y), on the same batch
server   E, G <- sum_k p_k (E_k, G_k);  P_i stays on its client
used as  G(f) + P_i(f);  G(f) alone is the generic model
"""

from typing import Literal

from ..client import SGD
from ..core import Algorithm
from ..networks import TwoHeads
from ..select import Named
from ..server.average import Weighting
from ..server.parts import PartAverage


def fedrod(
    *, personal_init: Literal["generic", "zeros"] = "generic", weighting: Weighting = "samples"
) -> Algorithm:
    """A generic head that classes of all sizes train alike, and a personal head on top of it."""
    zeros = personal_init == "zeros"
    return Algorithm(
        SGD(),
        PartAverage(weighting, copies=() if zeros else (("personal_head", "head"),)),
        personal=Named(("personal_head",)),
        network=TwoHeads(zeros),
        headline="received",
    )
