"""FedMCSA and its ablations.

    @article{guo2023fedmcsa,
      author = {Guo, Qi and Qi, Yong and Qi, Saiyu and Wu, Di and Li, Qian},
      title = {{FedMCSA}: Personalized Federated Learning via Model Components Self-Attention},
      journal = {Neurocomputing},
      year = {2023},
      doi = {10.1016/j.neucom.2023.126831},
      eprint = {2208.10731},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    server   M_l = row softmax of sigma cos(theta_l, theta_l) over the cohort, for every component l;   (7)
             A_i = sum_k M_l[i, k] theta_l[k]                                                      (6), (8)
    client   theta_i <- theta_i - lr (g + lam (theta_i - A_i) + mu theta_i), from A_i if it is new      (9)

All clients train in every round; only the cohort uploads and receives an answer. The paper and its code differ:

              unit    size_weighted  anchor of lam             weight_decay mu
    paper     layer   no             A_i, fixed for the round  0
    code      tensor  yes            moves with theta: inert   0.001, unless the run sets another

Ablations (Table 2):

    fedmcsa_no_mcsa   A_i = sum_k p_k theta_k in place of (7) and (8)
    fedavg_mcsa       theta_i <- theta_i - lr g, from A_i, in place of (9)
    pfedme_mcsa       pFedMe's Algorithm 1 on the client, from A_i, in place of (9)
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..client import SGD, Proximal, StartPoint
from ..core.algorithm import ANSWERED_UPLOADS, Algorithm, Participation
from ..core.options import Count, NonNegative, Positive
from ..core.selectors import Unit
from ..server import Average
from ..server.mixing import Mixing, Pool, cosines
from ..server.products import softmax_
from .pfedme import PFedMeClient
from .table import Family, method

Profile = Literal["paper", "code"]
Anchor = Literal["round", "moving"]

PROFILES: dict[str, dict[str, Any]] = {
    "paper": {"unit": "layer", "size_weighted": False, "anchor": "round", "weight_decay": 0.0},
    "code": {"unit": "tensor", "size_weighted": True, "anchor": "moving", "weight_decay": 0.001},
}


DEFAULT_LAM = 5.0
"""The strength that FedMCSA's code has, where it does nothing: the anchor moves with the model."""


def make_client(lam: float, anchor: str, start: StartPoint) -> SGD:
    """Return local SGD with the proximal term of an anchor, `round` or `moving`."""
    # The proximal term of an anchor that moves with the model is always zero.
    return SGD((Proximal(lam),) if anchor == "round" else (), start=start)


def resolve_profile(profile: Profile, **switches: Any) -> tuple[Any, ...]:
    """Return the given switches; the profile replaces None."""
    return tuple(PROFILES[profile][key] if value is None else value for key, value in switches.items())


def note_inert_lam(name: str, anchor: str, lam: float) -> tuple[str, ...]:
    """Return a note if the user gave a lam that has no effect."""
    if anchor == "round" or lam in (0.0, DEFAULT_LAM):
        return ()
    return (f"{name}: lam={lam:g} has no effect because the anchor moves with the model (anchor=moving)",)


@dataclass(frozen=True)
class Attention(Mixing):
    """Server rule of FedMCSA: M_l = row softmax of sigma cos(theta_l, theta_l), equations 6 to 8.

    The denominator of (7) is the sum over the row, as the text says. Options: see `fedmcsa`.
    """

    sigma: float = 50.0
    size_weighted: bool = False

    def weights(self, pool: Pool) -> Tensor:
        scores = cosines(pool).mul_(self.sigma)
        if self.size_weighted:
            scores += pool.n.to(scores.dtype).log()
        return softmax_(scores.masked_fill_(~pool.allowed, -torch.inf))


@method(
    Family.MIXTURE,
    "a mixture per client and component, by cosine",
    "SGD, maybe with a pull to the mixture",
    tune={"sigma": (20.0, 50.0, 100.0)},
)
def fedmcsa(
    *,
    profile: Profile = "code",
    sigma: NonNegative = 50.0,
    lam: NonNegative = DEFAULT_LAM,
    unit: Unit | None = None,
    size_weighted: bool | None = None,
    anchor: Anchor | None = None,
    weight_decay: NonNegative | None = None,
) -> Algorithm:
    """Each component of a client's model is mixed from clients with a similar component.

    Source: Guo et al. (2023), Algorithm 1 and equations 6 to 9. `PROFILES` has the values of both profiles.

    Args:
        profile: fills in options that are None: `code` as in the public code and the paper's tables, `paper` as in the
            paper's equations.
        sigma: factor sigma of the cosines in the softmax; 50 in the paper, 1000 in public code; 0 mixes without regard
            to similarity.
        lam: strength lambda of the pull to the anchor; without effect if the anchor is `moving`.
        unit: component l that has one mixing matrix: the whole `model`, a `layer` (weight and bias), or a `tensor`.
        size_weighted: whether the training samples n_k multiply exp(sigma cos) before normalisation.
        anchor: `round` is A_i, fixed for the round; `moving` follows theta_i after every step.
        weight_decay: l2 coefficient mu; None takes the run's coefficient if there is one, else the profile's.
    """
    unit, size_weighted, anchor = resolve_profile(profile, unit=unit, size_weighted=size_weighted, anchor=anchor)
    return Algorithm(
        make_client(lam, anchor, "newest"),
        Attention(unit, sigma=sigma, size_weighted=size_weighted),
        participation=ANSWERED_UPLOADS,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=note_inert_lam("fedmcsa", anchor, lam),
    )


@method(Family.GLOBAL, "one average", "as FedMCSA")
def fedmcsa_no_mcsa(
    *,
    profile: Profile = "code",
    lam: NonNegative = DEFAULT_LAM,
    anchor: Anchor | None = None,
    weight_decay: NonNegative | None = None,
    evaluate: Literal["received", "trained"] = "received",
) -> Algorithm:
    """FedMCSA with plain averaging in place of attention.

    Source: Guo et al. (2023), Table 2.

    Args:
        profile: `code` or `paper`; fills in `anchor` and `weight_decay` if they are None, as in `fedmcsa`.
        lam: strength lambda of the pull to the anchor; without effect if the anchor is `moving`.
        anchor: `round` is the received average, fixed for the round; `moving` follows theta_i after every step.
        weight_decay: l2 coefficient mu; None takes the run's coefficient if there is one, else the profile's.
        evaluate: `received` sends the average to all clients and scores the average, whose accuracy fits the paper's
            table. `trained` answers the cohort with the average and scores the clients' models after local training.
    """
    (anchor,) = resolve_profile(profile, anchor=anchor)
    to_all = evaluate == "received"
    return Algorithm(
        make_client(lam, anchor, "sent" if to_all else "newest"),
        Average(),
        participation=Participation(train="all", receive="all") if to_all else ANSWERED_UPLOADS,
        evaluation_point=evaluate,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=note_inert_lam("fedmcsa_no_mcsa", anchor, lam),
    )


@method(Family.MIXTURE, "as FedMCSA", "SGD", cites=("fedavg",), tune={"sigma": (20.0, 50.0, 100.0)})
def fedavg_mcsa(
    *, profile: Profile = "code", sigma: NonNegative = 50.0, unit: Unit | None = None, size_weighted: bool | None = None
) -> Algorithm:
    """Plain local SGD of all clients, with component attention on the server.

    Source: Guo et al. (2023), Table 2.

    Args:
        profile: `code` or `paper`; fills in `unit` and `size_weighted` if they are None, as in `fedmcsa`.
        sigma: factor sigma of the cosines in the softmax; see `fedmcsa`.
        unit: component l that has one mixing matrix: the whole `model`, a `layer` (weight and bias), or a `tensor`.
        size_weighted: whether the training samples n_k multiply exp(sigma cos) before normalisation.
    """
    unit, size_weighted = resolve_profile(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        SGD(start="newest"), Attention(unit, sigma=sigma, size_weighted=size_weighted), participation=ANSWERED_UPLOADS
    )


@method(
    Family.MIXTURE,
    "as FedMCSA",
    "as pFedMe",
    cites=("pfedme",),
    tune={"sigma": (20.0, 50.0, 100.0), "lam": (5.0, 15.0, 30.0)},
)
def pfedme_mcsa(
    *,
    profile: Profile = "code",
    sigma: NonNegative = 50.0,
    lam: NonNegative = 15.0,
    K: Count = 5,
    personal_lr: Positive = 0.05,
    unit: Unit | None = None,
    size_weighted: bool | None = None,
) -> Algorithm:
    """The client rule of pFedMe, with component attention in place of averaging.

    Source: Guo et al. (2023), Table 2. The server mixes the local models w_i, not the personal models theta_i.

    Args:
        profile: `code` or `paper`; fills in `unit` and `size_weighted` if they are None, as in `fedmcsa`.
        sigma: factor sigma of the cosines in the softmax; see `fedmcsa`.
        lam: strength lambda of the pull of theta_i to w_i; see `pfedme`.
        K: steps of theta_i per local step, all on the same batch.
        personal_lr: learning rate of theta_i.
        unit: component l that has one mixing matrix: the whole `model`, a `layer` (weight and bias), or a `tensor`.
        size_weighted: whether the training samples n_k multiply exp(sigma cos) before normalisation.
    """
    unit, size_weighted = resolve_profile(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        PFedMeClient(lam, K, personal_lr, start="newest"),
        Attention(unit, sigma=sigma, size_weighted=size_weighted),
        participation=ANSWERED_UPLOADS,
    )
