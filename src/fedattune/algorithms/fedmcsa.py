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
from ..core.algorithm import Algorithm, Participation
from ..core.options import Count, NonNegative, Positive
from ..core.selectors import Unit
from ..server import Average
from ..server.mixing import Mixing, Pool, cosines, softmax_
from .pfedme import PFedMeClient
from .table import Family, method

Profile = Literal["paper", "code"]

Anchor = Literal["round", "moving"]

PROFILES: dict[str, dict[str, Any]] = {
    "paper": {"unit": "layer", "size_weighted": False, "anchor": "round", "weight_decay": 0.0},
    "code": {"unit": "tensor", "size_weighted": True, "anchor": "moving", "weight_decay": 0.001},
}

REPLY = Participation(train="all", receive="reply")


def make_client(lam: float, anchor: str, start: StartPoint) -> SGD:
    """Return local SGD with the proximal term of an anchor."""
    # The proximal term of an anchor that moves with the model is always zero.
    return SGD((Proximal(lam),) if anchor == "round" else (), start=start)


def resolve_profile(profile: Profile, **switches: Any) -> tuple[Any, ...]:
    """Return the given switches; the profile replaces None."""
    return tuple(PROFILES[profile][key] if value is None else value for key, value in switches.items())


def note_inert_lam(name: str, anchor: str, lam: float) -> tuple[str, ...]:
    """Return a note if lam has no effect."""
    inert = anchor == "moving" and lam > 0
    return (
        f"{name}: lam={lam:g} has no effect because the anchor moves with the model (anchor=moving)",
    ) * inert


@dataclass(frozen=True)
class Attention(Mixing):
    """Server rule of FedMCSA: M_l = row softmax of sigma cos(theta_l, theta_l), equations 6 to 8.

    The denominator of (7) is the sum over the row, as the text says. `size_weighted` multiplies by the sample counts
    before normalisation, as the public code does.
    """

    sigma: float = 50.0
    size_weighted: bool = False

    def weights(self, pool: Pool) -> Tensor:
        """Take the softmax over the allowed models."""
        scores = cosines(pool).mul_(self.sigma)
        if self.size_weighted:
            scores += pool.n.to(scores.dtype).log()
        return softmax_(scores.masked_fill_(~pool.allowed, -torch.inf))


@method(
    Family.MIXTURE, "a mixture per client and component, by cosine", "SGD, maybe with a pull to the mixture"
)
def fedmcsa(
    *,
    profile: Profile = "code",
    sigma: NonNegative = 50.0,
    lam: NonNegative = 5.0,
    unit: Unit | None = None,
    size_weighted: bool | None = None,
    anchor: Anchor | None = None,
    weight_decay: NonNegative | None = None,
) -> Algorithm:
    """Each component of a client's model is mixed from clients with a similar component.

    Options that are None follow the profile: `code` as in the paper's tables, `paper` as in its equations.
    """
    unit, sizes, anchor = resolve_profile(profile, unit=unit, size_weighted=size_weighted, anchor=anchor)
    return Algorithm(
        make_client(lam, anchor, "newest"),
        Attention(unit, sigma=sigma, size_weighted=sizes),
        participation=REPLY,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=note_inert_lam("fedmcsa", anchor, lam),
    )


@method(Family.GLOBAL, "one average", "as FedMCSA")
def fedmcsa_no_mcsa(
    *,
    profile: Profile = "code",
    lam: NonNegative = 5.0,
    anchor: Anchor | None = None,
    weight_decay: NonNegative | None = None,
    evaluate: Literal["received", "trained"] = "received",
) -> Algorithm:
    """FedMCSA with plain averaging in place of attention.

    `received` sends the average to all clients and evaluates it, as in the paper's table. `trained` answers the cohort
    with the average and evaluates the clients' models after local training.
    """
    (anchor,) = resolve_profile(profile, anchor=anchor)
    to_all = evaluate == "received"
    return Algorithm(
        make_client(lam, anchor, "sent" if to_all else "newest"),
        Average(),
        participation=Participation(train="all", receive="all") if to_all else REPLY,
        headline=evaluate,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=note_inert_lam("fedmcsa_no_mcsa", anchor, lam),
    )


@method(Family.MIXTURE, "as FedMCSA", "SGD", cites=("fedavg",))
def fedavg_mcsa(
    *,
    profile: Profile = "code",
    sigma: NonNegative = 50.0,
    unit: Unit | None = None,
    size_weighted: bool | None = None,
) -> Algorithm:
    """Plain local SGD of all clients, with component attention on the server."""
    unit, sizes = resolve_profile(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        SGD(start="newest"), Attention(unit, sigma=sigma, size_weighted=sizes), participation=REPLY
    )


@method(Family.MIXTURE, "as FedMCSA", "as pFedMe", cites=("pfedme",))
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
    """The client rule of pFedMe, with component attention in place of averaging."""
    unit, sizes = resolve_profile(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        PFedMeClient(lam, K, personal_lr, start="newest"),
        Attention(unit, sigma=sigma, size_weighted=sizes),
        participation=REPLY,
    )
