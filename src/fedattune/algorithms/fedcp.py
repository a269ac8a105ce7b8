"""FedCP.

    @inproceedings{zhang2023fedcp,
      author = {Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and
        Guan, Haibing},
      title = {{FedCP}: Separating Feature Information for Personalized Federated Learning via Conditional
        Policy},
      booktitle = {ACM SIGKDD Conference on Knowledge Discovery and Data Mining (KDD)},
      year = {2023},
      eprint = {2307.01217},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   E_p <- E_g;  v = sum over classes of H_p's weights (before the client's first round: drawn), of norm 1
             f_p = E_p(x), f_g = E_g(x);  [r ; s] = Gumbel softmax of each pair of P(f_p * v),
             P = linear (f, 2f), layer normalisation, ReLU;  y = H_p(r * f_p) + H_g(s * f_p)
             SGD of E_p, H_p, P on cross-entropy + lam MMD(f_p, f_g)
    server   E_g <- sum_k p_k E_p,k;  P <- sum_k p_k P_k;  H_g <- sum_k p_k ((1 - c) H_g + c H_p,k), c = 1/2
"""

from typing import Literal

from ..core.algorithm import Algorithm
from ..core.options import Fraction, NonNegative
from ..server.average import PartAverage, Weighting
from .separation import PERSONAL_MODULES, STARTING_COPIES, FedCPNetwork, SeparationClient, VectorKind
from .table import Family, method


@method(
    Family.TWO_HEADS,
    "one average of shared parts",
    "SGD; a policy divides features between two heads",
    tune={"lam": (0.0, 0.1, 1.0)},
)
def fedcp(
    *,
    lam: NonNegative = 0.0,
    noise: bool = True,
    context: Literal["product", "client"] = "product",
    first_context: Literal["random", "head"] = "random",
    client_vector: VectorKind = "sum",
    head_mix: Fraction = 0.5,
    reset_personal_extractor: bool = True,
    weighting: Weighting = "samples",
) -> Algorithm:
    """A policy divides every sample's features between a personal and a global head.

    Source: Zhang et al. (2023), Algorithm 1.

    Args:
        lam: weight lambda of the MMD between personal and global features; the paper tunes lambda per data set.
        noise: whether training adds Gumbel noise to the policy; evaluation has no noise.
        context: input of the policy: the `product` f_p * v, or v alone (`client`), which divides all samples of a
            client alike and shows what the sample's features add.
        first_context: vector v in a client's first round: `random` is one draw for all clients, divided by its norm;
            `head` derives v from the head, as in later rounds.
        client_vector: vector v of the client: the `sum` of H_p's class rows, the sum of their `absolute` values, or the
            `difference`, the sum of |H_p - H_g|. With `sum`, all clients have the same v.
        head_mix: share c of the personal head in the uploaded head: 0 never changes H_g, 1 averages the personal heads.
        reset_personal_extractor: whether E_p starts from E_g in every round; False keeps the client's own E_p.
        weighting: weights p_k in the averages: by training samples, or `uniform`.
    """
    random_first = first_context == "random"
    return Algorithm(
        SeparationClient(reset_personal_extractor, head_mix, client_vector, random_first),
        PartAverage(weighting, copies=STARTING_COPIES),
        personal=PERSONAL_MODULES,
        network=FedCPNetwork(lam, context, vector=client_vector, random_first=random_first, noise=noise),
        evaluation_point="received",
    )
