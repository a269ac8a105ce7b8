"""Clients that learn from each other more than from the rest."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .relations import MIN_OTHERS_SHARE, BoolArray, FloatArray, MixingAnalysis, cut_clusters, seriate

MIN_TIMES_CHANCE = 1.2
"""Times chance that clusters must keep of what clients are given by others; else they are none."""


N_SHUFFLES = 39
"""Shuffled mixtures whose clusters must all keep less, as they would by chance in 39 cases of 40."""


@dataclass(frozen=True)
class Clusters:
    """Clients that learn from each other.

    `kept` is how much of what they were given by others came from their own cluster, `chance` what it would be if all
    others counted the same; both of clients that have others in their cluster. `inside` and `between` are how alike
    labels are (0 to 1) of clients of one cluster and of two, None where labels are not known.
    """

    clients: list[list[str]]
    kept: float
    chance: float
    inside: float | None
    between: float | None


@dataclass(frozen=True)
class Arrangement:
    """An order of clients, the number of each one's cluster, and how much these keep; all 0 if they keep too little."""

    order: list[int]
    clusters: list[int]
    kept: float | None = None
    chance: float | None = None


def arrange_clients(weights: FloatArray, offered: BoolArray) -> Arrangement:
    """Clients in an order in which those that learn from each other are neighbours, and their clusters, if any.

    Clusters are found in noise as well, so they count only if they keep more of what clients were given by others than
    those of mixtures whose weights are shuffled among the clients that there were to choose from.

    Args:
        weights: (N, N), rows receive.
        offered: (N, N), whose models there were to give.

    """
    order, found = seriate(weights)
    of = np.array(found)
    none = Arrangement(order, [0] * len(order))
    if (score := _measure_clusters(weights, offered, of)) is None or score[0] < MIN_TIMES_CHANCE * score[1]:
        return none
    for shuffled in _shuffle_rows(weights, offered):
        by_chance = _measure_clusters(shuffled, offered, cut_clusters(shuffled, len(set(found))))
        if by_chance is not None and by_chance[0] - by_chance[1] >= score[0] - score[1] - 1e-9:
            return none
    return Arrangement(order, found, *score)


def _measure_clusters(
    weights: FloatArray, offered: BoolArray, of: NDArray[np.int_]
) -> tuple[float, float] | None:
    """What clients kept in their clusters of what others gave, and what chance would; None without clusters."""
    others = offered & ~np.eye(len(of), dtype=bool)
    same = others & (of[:, None] == of)
    totals = np.where(others, weights, 0).sum(1)
    # A client by itself has nobody to learn from in its cluster, and says nothing of the others'.
    known = same.any(1) & ~np.isnan(weights).any(1) & (totals >= MIN_OTHERS_SHARE)
    if not known.any() or not (others & ~same)[known].any():
        return None
    kept = np.where(same, weights, 0).sum(1)[known] / totals[known]
    chance = same.sum(1)[known] / others.sum(1)[known]
    return float(kept.mean()), float(chance.mean())


def _shuffle_rows(weights: FloatArray, offered: BoolArray) -> Iterator[FloatArray]:
    """The weights with those of each row shuffled among the others that were offered to it."""
    generator = np.random.default_rng(0)
    others = offered & ~np.eye(len(weights), dtype=bool)
    places = [np.flatnonzero(row) for row in others]
    for _ in range(N_SHUFFLES):
        shuffled = weights.copy()
        for i, there in enumerate(places):
            shuffled[i, there] = generator.permutation(weights[i, there])
        yield shuffled


def find_clusters(relations: MixingAnalysis) -> Clusters | None:
    """The clusters by the last weights, averaged over the components; None where there are none."""
    found = arrange_clients(relations.mean, relations.offered)
    if found.kept is None or found.chance is None:
        return None
    of = np.array(found.clusters)
    same = (of[:, None] == of) & ~np.eye(len(of), dtype=bool)
    apart = of[:, None] != of
    together = [
        sorted(np.flatnonzero(of == c)) for c in dict.fromkeys(found.clusters[i] for i in found.order)
    ]
    alike = relations.similarity
    inside, between = (
        (None, None) if alike is None else (float(alike[same].mean()), float(alike[apart].mean()))
    )
    names = relations.names
    return Clusters([[names[i] for i in one] for one in together], found.kept, found.chance, inside, between)
