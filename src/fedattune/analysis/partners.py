"""What one client was given of the others' models: component by component, and over the rounds of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .relations import (
    FLAT_WEIGHT,
    ROUNDS_BACK,
    FloatArray,
    LabelAgreement,
    MixingAnalysis,
    measure_agreement,
    thin_out,
)

N_TOP_PARTNERS = 3
"""Partners that count as the top ones."""


EVEN_SPREAD = 0.1
"""Spread of the others' weights, as a share of their mean, up to which none of them stands out."""


MAX_TRACED_ROUNDS = 60
"""Rounds looked at for how a client's partners changed, evenly spread over those that are stored."""


MIN_PARTNER_RATIO = 0.1
"""Of the largest partner's share, below which another one is no top partner."""


MIN_UNSEEN_SHARE = 1e-4
"""Share of a mixture above which what came from clients that are not looked at is told."""


@dataclass(frozen=True)
class Partner:
    """A client that another one was given a share of: 0.1 is a tenth of the model."""

    client: str
    weight: float


@dataclass(frozen=True)
class MixtureShares:
    """What a client was given of one component in one round, in shares of the mixture.

    `partners` are the other clients with a share, the largest first, and `others` is their sum; `unseen` is the sum
    over clients that are not looked at, as they are not evaluated; `even`: no partner stands out.
    """

    round: int
    own: float
    others: float
    unseen: float
    even: bool
    partners: list[Partner]

    @property
    def top(self) -> list[Partner]:
        """The partners with the largest shares, without those that hardly count beside the first."""
        return [
            one
            for one in self.partners[:N_TOP_PARTNERS]
            if one.weight >= MIN_PARTNER_RATIO * self.partners[0].weight
        ]


@dataclass(frozen=True)
class ComponentTrace:
    """One component for one client: what it was given last, and in the first and a middle round before that.

    `settled` is the first round looked at since which the top partners are the same; None where none stands out.
    """

    name: str
    last: MixtureShares
    before: list[MixtureShares]
    settled: int | None
    agreement: LabelAgreement | None


def compute_shares(
    names: Sequence[str], i: int, round_: int, row: FloatArray, total: float | None = None
) -> MixtureShares:
    """What client `i` was given in a round, from its row of weights (N,); `total`: its sum over all clients."""
    others = np.delete(np.arange(len(row)), i)
    order = others[np.argsort(-row[others], kind="stable")]
    weights = row[others]
    mean = abs(float(weights.mean())) if len(weights) else 0.0
    even = len(weights) > 1 and float(np.ptp(weights)) <= EVEN_SPREAD * mean + FLAT_WEIGHT
    rest = 0.0 if total is None else total - float(row.sum())
    return MixtureShares(
        round_,
        float(row[i]),
        float(weights.sum()),
        rest if abs(rest) > MIN_UNSEEN_SHARE else 0.0,
        even,
        [Partner(names[k], float(row[k])) for k in order if row[k] > FLAT_WEIGHT],
    )


def trace_components(relations: MixingAnalysis, i: int) -> list[ComponentTrace]:
    """Component by component, what the client at place `i` was given; none if it took part in no stored round."""
    last = relations.since(relations.rounds[-1])[i] if relations.rounds else None
    if last is None:
        return []
    found: dict[str, list[MixtureShares]] = {}
    for r in sorted({*thin_out(relations.rounds, MAX_TRACED_ROUNDS), last}):
        for component, (row, total) in _read_rows(relations, r, i).items():
            found.setdefault(component, []).append(compute_shares(relations.names, i, r, row, total))
    return [_trace_component(relations, i, component, rows) for component, rows in found.items()]


def sum_rows(relations: MixingAnalysis) -> FloatArray:
    """The sum (N,) of every client's last row over all clients, evaluated or not; the mean over the components."""
    sums = np.full(len(relations.numbers), np.nan)
    place = {int(number): i for i, number in enumerate(relations.numbers)}
    for r in relations.rounds[-ROUNDS_BACK:]:
        rows, _, weights = relations.run.mixing.among(r)
        mean = np.mean([matrix.sum(1, dtype=np.float64) for matrix in weights.values()], axis=0)
        here = [k for k, number in enumerate(rows) if number in place]
        sums[[place[rows[k]] for k in here]] = mean[here]
    return sums


def _read_rows(relations: MixingAnalysis, round_: int, i: int) -> dict[str, tuple[FloatArray, float]]:
    """Component -> the client's row (N,) and its sum over all clients; nothing if it was given none in the round."""
    rows, columns, weights = relations.run.mixing.among(round_)
    number = int(relations.numbers[i])
    if number not in rows:
        return {}
    at = {column: k for k, column in enumerate(columns)}
    there = [(place, at[int(n)]) for place, n in enumerate(relations.numbers) if int(n) in at]
    out = {}
    for component, matrix in weights.items():
        found = matrix[rows.index(number)].astype(np.float64)
        row = np.zeros(len(relations.numbers))
        row[[place for place, _ in there]] = found[[k for _, k in there]]
        out[component] = row, float(found.sum())
    return out


def _trace_component(
    relations: MixingAnalysis, i: int, component: str, rows: list[MixtureShares]
) -> ComponentTrace:
    last = rows[-1]
    before = [rows[0], rows[(len(rows) - 1) // 2]] if len(rows) > 2 else rows[:-1]
    settled = None
    if last.partners and not last.even:
        same = {partner.client for partner in last.top}
        for one in reversed(rows):
            if {partner.client for partner in one.top} != same:
                break
            settled = one.round
    similarity = relations.similarity
    agree = (
        None
        if similarity is None
        else measure_agreement(relations.last[component], similarity, [i], relations.offered)
    )
    return ComponentTrace(component, last, before, settled, agree)
