"""One client's partners: the clients whose models were mixed into its own, and how they change over the rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compare import FloatArray
from .agreement import FLAT_WEIGHT, LabelAgreement

N_TOP_PARTNERS = 3
EVEN_SPREAD = 0.1
"""Spread of the others' weights, in their mean, up to which no partner stands out."""
MIN_PARTNER_RATIO = 0.1
"""Share of a top partner, in the largest partner's share."""
MIN_UNSEEN_SHARE = 1e-4
"""Share of clients that are not looked at, below which it counts as none."""


@dataclass(frozen=True)
class Partner:
    """A client and its share of another client's mixture: 0.1 is a tenth of the model."""

    client: str
    weight: float


@dataclass(frozen=True)
class MixtureShares:
    """One client's mixture of one component in one round, in shares.

    Attributes:
        round: the round.
        own: share of the client's own model.
        others: sum of the shares of the other clients.
        unseen: sum of the shares of clients that are not looked at, without attackers.
        attackers: sum of the shares of attackers that are not looked at.
        is_even: no partner stands out.
        partners: the other clients with a share, the largest first.

    """

    round: int
    own: float
    others: float
    unseen: float
    is_even: bool
    partners: list[Partner]
    attackers: float = 0.0

    @property
    def top(self) -> list[Partner]:
        """The partners with the largest shares; partners that hardly count beside the first are left out."""
        smallest = MIN_PARTNER_RATIO * self.partners[0].weight if self.partners else 0.0
        return [one for one in self.partners[:N_TOP_PARTNERS] if one.weight >= smallest]


@dataclass(frozen=True)
class ComponentTrace:
    """One client's mixtures of one component over the rounds.

    Attributes:
        name: the component.
        last: the last mixture.
        before: the mixtures of the first and of a middle round.
        stable_since: first round looked at since which the top partners are the same; None if no partner stands out.
        agreement: of the last weights with label similarity; None if labels are not known.

    """

    name: str
    last: MixtureShares
    before: list[MixtureShares]
    stable_since: int | None
    agreement: LabelAgreement | None


def compute_shares(
    names: Sequence[str],
    i: int,
    round_: int,
    row: FloatArray,
    total: float | None = None,
    attackers: float = 0.0,
) -> MixtureShares:
    """Compute the shares of client `i` in a round.

    Args:
        names: of the clients looked at (N).
        i: position of the client among them.
        round_: the round.
        row: weights that the client was given (N,).
        total: sum of its weights over all clients; default: the sum of the row.
        attackers: sum of its weights over attackers that are not looked at.

    """
    others = np.delete(np.arange(len(row)), i)
    order = others[np.argsort(-row[others], kind="stable")]
    weights = row[others]
    mean = abs(float(weights.mean())) if len(weights) else 0.0
    is_even = len(weights) > 1 and float(np.ptp(weights)) <= EVEN_SPREAD * mean + FLAT_WEIGHT
    rest = 0.0 if total is None else total - float(row.sum()) - attackers
    return MixtureShares(
        round_,
        float(row[i]),
        float(weights.sum()),
        rest if abs(rest) > MIN_UNSEEN_SHARE else 0.0,
        is_even,
        [Partner(names[k], float(row[k])) for k in order if row[k] > FLAT_WEIGHT],
        attackers,
    )


def build_trace(
    name: str, shares: Sequence[MixtureShares], agreement: LabelAgreement | None
) -> ComponentTrace:
    """Build the trace of a component.

    Args:
        name: the component.
        shares: a client's mixtures in ascending rounds, at least one.
        agreement: of the last weights with label similarity.

    """
    last = shares[-1]
    before = [shares[0], shares[(len(shares) - 1) // 2]] if len(shares) > 2 else list(shares[:-1])
    stable_since = None
    if last.partners and not last.is_even:
        top = {partner.client for partner in last.top}
        for one in reversed(shares):
            if {partner.client for partner in one.top} != top:
                break
            stable_since = one.round
    return ComponentTrace(name, last, before, stable_since, agreement)
