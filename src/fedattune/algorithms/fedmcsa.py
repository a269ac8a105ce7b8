"""FedMCSA. Guo et al., 2022, https://arxiv.org/abs/2208.10731, Algorithm 1.

    server   M_l = row softmax of sigma cos(theta_l, theta_l) over the cohort, for every component l;   (7)
             A_i = sum_k M_l[i, k] theta_l[k]                                                      (6), (8)
    client   theta_i <- theta_i - lr (g + lam (theta_i - A_i) + mu theta_i), from A_i if it is new      (9)

All clients train in every round, only the cohort uploads and is answered. Paper and public code differ:

              unit    size_weighted  anchor of lam             weight_decay mu
    paper     layer   no             A_i, fixed for the round  0
    code      tensor  yes            moves with theta: inert   0.001, unless the run gives one
"""

from typing import Any, Literal

from ..client import SGD, Proximal, Start
from ..core import Algorithm, Participation
from ..registry import NonNegative
from ..select import Unit
from ..server import Attention

Profile = Literal["paper", "code"]
Anchor = Literal["round", "moving"]
PROFILES: dict[str, dict[str, Any]] = {
    "paper": {"unit": "layer", "size_weighted": False, "anchor": "round", "weight_decay": 0.0},
    "code": {"unit": "tensor", "size_weighted": True, "anchor": "moving", "weight_decay": 0.001},
}
REPLY = Participation(train="all", receive="reply")


def proximal_client(lam: float, anchor: str, start: Start) -> SGD:
    """Local SGD with the proximal term that an anchor makes."""
    # An anchor that moves with the model makes the proximal term zero at every step.
    return SGD((Proximal(lam),) if anchor == "round" else (), start=start)


def resolve(profile: Profile, **given: Any) -> tuple[Any, ...]:
    """The given switches, those that are None taken from the profile."""
    return tuple(PROFILES[profile][key] if value is None else value for key, value in given.items())


def inert_notes(name: str, anchor: str, lam: float) -> tuple[str, ...]:
    """Say so when lam cannot have an effect."""
    inert = anchor == "moving" and lam > 0
    return (
        f"{name}: lam={lam:g} has no effect because the anchor moves with the model (anchor=moving)",
    ) * inert


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
    """Every component of a client's model is mixed from the clients whose same component is alike.

    Options left at None follow the profile: `code` is what the paper's tables follow, `paper` its equations.
    """
    unit, sizes, anchor = resolve(profile, unit=unit, size_weighted=size_weighted, anchor=anchor)
    return Algorithm(
        proximal_client(lam, anchor, "newest"),
        Attention(unit, sigma=sigma, size_weighted=sizes),
        participation=REPLY,
        weight_decay=weight_decay,
        default_weight_decay=PROFILES[profile]["weight_decay"],
        notes=inert_notes("fedmcsa", anchor, lam),
    )
