"""FedAM.

    @article{zhang2025attention,
      author = {Zhang, Xiaoqin and Jin, Xixing and Lu, Yanjun and Cao, Zeyu},
      title = {Attention-Driven Feature Separation Method for Personalized Federated Learning},
      journal = {Application Research of Computers},
      year = {2025},
      number = {4},
      pages = {1102--1107},
      doi = {10.19734/j.issn.1001-3695.2024.09.0325},
      note = {In Chinese}
    }

Rules:

    client   E_p <- E_g;  v = sum over classes of H_p's weights, of length 1 (fixed for the round)
             f_p = E_p(x), f_g = E_g(x);  [r ; s] = softmax of each pair of A(f_p * v),
             A = linear (f, h), ReLU, linear (h, 2f);  y = H_p(r * f_p) + H_g(s * f_p)
             SGD of E_p, H_p, A on cross-entropy + lam ||cov(f_p) - cov(f_g)||_F^2 / (4 f^2)
    server   E_g <- sum_k p_k E_p,k;  A <- sum_k p_k A_k;  H_g <- sum_k p_k ((1 - c) H_g + c H_p,k)

The paper has no equations. It names the five parts, the frozen, trained and averaged ones, correlation alignment, and
an attention of two linear layers with ReLU and softmax. The context of the attention joins sample features and the
weights of the personal head. All other choices follow FedCP, the nearest method; each is an option.
"""

from ..core.algorithm import Algorithm
from ..core.options import Count, Fraction, NonNegative
from ..server.average import PartAverage, Weighting
from .separation import (
    PERSONAL_PARTS,
    STARTING_COPIES,
    CombinationKind,
    ContextKind,
    FedAMNetwork,
    SeparationClient,
    VectorKind,
)
from .table import Family, method


@method(Family.TWO_HEADS, "one average of shared parts", "SGD; attention divides features between two heads")
def fedam(
    *,
    lam: NonNegative = 1.0,
    hidden: Count | None = None,
    context: ContextKind = "product",
    client_vector: VectorKind = "sum",
    per_feature: bool = True,
    combine: CombinationKind = "logits",
    head_mix: Fraction = 0.5,
    reset_personal_extractor: bool = True,
    weighting: Weighting = "samples",
) -> Algorithm:
    """Attention divides every sample's features between a personal and a global head.

    `hidden` is 0.19 times the feature size by default.
    """
    note = "fedam: client_vector=sum is the same vector for all clients in all rounds (but for weight decay)"
    return Algorithm(
        SeparationClient(reset_personal_extractor, head_mix, client_vector),
        PartAverage(weighting, copies=STARTING_COPIES),
        personal=PERSONAL_PARTS,
        network=FedAMNetwork(lam, context, combine, client_vector, hidden=hidden, per_feature=per_feature),
        headline="received",
        notes=(note,) if client_vector == "sum" else (),
    )
