"""What FedMCSA is made of, taken apart: Table 2 of Guo et al., 2022, https://arxiv.org/abs/2208.10731.

fedmcsa_no_mcsa   A_i = sum_k p_k theta_k in place of (7) and (8)
fedavg_mcsa       theta_i <- theta_i - lr g, from A_i, in place of (9)
pfedme_mcsa       pFedMe's Algorithm 1 on the client, from A_i, in place of (9)
"""

from typing import Literal

from ..client import SGD, Moreau
from ..core import Algorithm, Participation
from ..registry import Count, NonNegative, Positive
from ..select import Unit
from ..server import Attention, Average
from .fedmcsa import PROFILES, REPLY, Anchor, Profile, inert_notes, proximal_client, resolve


def fedmcsa_no_mcsa(
    *,
    profile: Profile = "code",
    lam: NonNegative = 5.0,
    anchor: Anchor | None = None,
    weight_decay: NonNegative | None = None,
    evaluate: Literal["received", "trained"] = "received",
) -> Algorithm:
    """FedMCSA with plain averaging in place of attention.

    `received` sends the average to all clients and evaluates it, which is what the paper's table follows;
    `trained` answers the cohort with it and evaluates the clients' models after local training.
    """
    (anchor,) = resolve(profile, anchor=anchor)
    to_all = evaluate == "received"
    return Algorithm(
        proximal_client(lam, anchor, "sent" if to_all else "newest"),
        Average(),
        participation=Participation(train="all", receive="all") if to_all else REPLY,
        headline=evaluate,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=inert_notes("fedmcsa_no_mcsa", anchor, lam),
    )


def fedavg_mcsa(
    *,
    profile: Profile = "code",
    sigma: NonNegative = 50.0,
    unit: Unit | None = None,
    size_weighted: bool | None = None,
) -> Algorithm:
    """Plain local SGD of all clients with component attention on the server."""
    unit, sizes = resolve(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        SGD(start="newest"), Attention(unit, sigma=sigma, size_weighted=sizes), participation=REPLY
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
    """The client update of pFedMe with component attention in place of averaging."""
    unit, sizes = resolve(profile, unit=unit, size_weighted=size_weighted)
    return Algorithm(
        Moreau(lam, K, personal_lr, start="newest"),
        Attention(unit, sigma=sigma, size_weighted=sizes),
        participation=REPLY,
    )
