"""Clients that learn from each other more than from the rest."""

from dataclasses import dataclass

import numpy as np

from .relations import FLAT, Relations, seriation

STAND_OUT = 1.2
"""Times chance that clusters must keep of what clients are given by others; else they are none."""


@dataclass(frozen=True)
class Clusters:
    """Clients that learn from each other.

    `kept` is how much of what they were given by others came from their own cluster, `chance` what it would be if all
    others counted the same; `inside` and `between` are how alike labels are (0 to 1) of clients of one cluster and of
    two, None where labels are not known.
    """

    clients: list[list[str]]
    kept: float
    chance: float
    inside: float | None
    between: float | None


def clusters(relations: Relations) -> Clusters | None:
    """The clusters by the last weights, averaged over the components; None where they keep little more than chance."""
    mean = relations.mean
    order, found = seriation(mean)
    of = np.array(found)
    same = (of[:, None] == of) & ~np.eye(len(of), dtype=bool)
    apart = of[:, None] != of
    known = [
        i for i in range(len(of)) if not np.isnan(mean[i]).any() and (mean[i] @ (same | apart)[i]) > FLAT
    ]
    if not known or not same.any() or not apart.any():
        return None
    kept = float(np.mean([mean[i] @ same[i] / (mean[i] @ (same | apart)[i]) for i in known]))
    chance = float(np.mean([same[i].mean() * len(of) / (len(of) - 1) for i in known]))
    if kept < STAND_OUT * chance:
        return None
    together = [sorted(np.flatnonzero(of == c)) for c in dict.fromkeys(found[i] for i in order)]
    alike = relations.similarity
    inside, between = (
        (None, None) if alike is None else (float(alike[same].mean()), float(alike[apart].mean()))
    )
    return Clusters([[relations.names[i] for i in one] for one in together], kept, chance, inside, between)
