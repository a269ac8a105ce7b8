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

    client   E_p <- E_g;  v = sum over classes of |H_p - H_g|, of norm 1 (fixed for the round)
             f_p = E_p(x), f_g = E_g(x);  [r ; s] = softmax of each pair of A(N(f_p * v)),
             N standardises each sample over its features;  A = linear (f, h), ReLU, linear (h, 2f)
             y = H_p(r * f_p) + H_g(s * f_p)
             SGD of E_p, H_p, A on cross-entropy + lam ||C_p - C_g||_F^2 / (||C_p||_F^2 + ||C_g||_F^2),
             C_p, C_g = covariances of f_p, f_g
    server   E_g <- sum_k p_k E_p,k;  A <- sum_k p_k A_k;  H_g <- sum_k p_k ((1 - c) H_g + c H_p,k)

The paper has no equations. It names the five parts, the frozen, trained and averaged ones, correlation alignment, and
an attention of two linear layers with ReLU and softmax. The context of the attention joins sample features and the
weights of the personal head. All other choices are options, most as in FedCP, the nearest method. Three differ: FedCP's
v is the same for all clients; without N the attention sees hardly anything but its own biases, for which FedCP has a
layer normalisation of its own; and the factor 1 / (4 f^2) of Deep CORAL ties lam to the scale of the features.
"""

from ..core.algorithm import Algorithm
from ..core.options import Count, Fraction, NonNegative
from ..server.average import PartAverage, Weighting
from .separation import (
    PERSONAL_MODULES,
    STARTING_COPIES,
    AlignmentKind,
    CombinationKind,
    ContextKind,
    FedAMNetwork,
    SeparationClient,
    VectorKind,
)
from .table import Family, method


@method(
    Family.TWO_HEADS,
    "one average of shared parts",
    "SGD; attention divides features between two heads",
    tune={"lam": (0.01, 0.1, 1.0)},
)
def fedam(
    *,
    lam: NonNegative = 0.1,
    alignment: AlignmentKind = "relative",
    hidden: Count | None = None,
    context: ContextKind = "product",
    normalize: bool = True,
    client_vector: VectorKind = "difference",
    per_feature: bool = True,
    combine: CombinationKind = "logits",
    head_mix: Fraction = 0.5,
    reset_personal_extractor: bool = True,
    weighting: Weighting = "samples",
) -> Algorithm:
    """Attention divides every sample's features between a personal and a global head.

    Source: Zhang et al. (2025). The paper has no equations; the page lists what it leaves open.

    Args:
        lam: weight lambda of the correlation alignment; 1 slows training, and 10 harms it.
        alignment: ||C_p - C_g||_F^2 divided by ||C_p||_F^2 + ||C_g||_F^2 (`relative`), or by 4 f^2 as in Deep CORAL
            (`coral`), whose fitting lam depends on the scale of the features.
        hidden: width h of the attention's hidden layer; None takes 0.19 f, rounded, which gives the paper's traffic.
        context: input of the attention: the `product` f_p * v, f_p and v `concatenated`, or v alone (`client`), which
            divides all samples of a client alike and shows what the sample's features add.
        normalize: whether to standardise each sample's context over the features. Without it, the context is so small
            beside the attention's biases that the division hardly depends on the sample.
        client_vector: vector v of the client: the `sum` of H_p's class rows, the sum of their `absolute` values, or the
            `difference`, the sum of |H_p - H_g|. With `sum`, all clients have the same v.
        per_feature: whether every feature has a pair of weights r, s; False has one pair per sample.
        combine: combination of both heads: the sum of `logits`, or the mean of `probabilities`.
        head_mix: share c of the personal head in the uploaded head: 0 never changes H_g, 1 averages the personal heads.
        reset_personal_extractor: whether E_p starts from E_g in every round; False keeps the client's own E_p.
        weighting: weights p_k in the averages: by training samples, or `uniform`.
    """
    note = "fedam: client_vector=sum is the same vector for all clients in all rounds (but for weight decay)"
    return Algorithm(
        SeparationClient(reset_personal_extractor, head_mix, client_vector),
        PartAverage(weighting, copies=STARTING_COPIES),
        personal=PERSONAL_MODULES,
        network=FedAMNetwork(
            lam, context, normalize, combine, client_vector, hidden=hidden, per_feature=per_feature, alignment=alignment
        ),
        evaluation_point="received",
        notes=(note,) if client_vector == "sum" else (),
    )
