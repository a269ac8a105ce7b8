"""Similarity of the clients' labels, and how mixing weights agree with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compare import BoolArray, FloatArray

NEAREST_SHARE = 0.25
"""Share of the other clients that count as alike."""
FLAT_WEIGHT = 1e-6
"""Largest difference of weights that still counts as none."""
MIN_OTHERS_SHARE = 0.01
"""Share of others in a mixture below which a client learned from nobody."""


def compute_label_similarity(labels: FloatArray) -> FloatArray:
    """Compute how alike label distributions are: 1 minus the total variation distance.

    Args:
        labels: samples of each class (N, classes).

    Returns:
        (N, N): 1 for the same shares of every class, 0 for no class in common.

    """
    shares = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    # Rounding keeps ties: ranks and nearest clients depend on them.
    return np.stack([np.round(1 - np.abs(shares - row).sum(1) / 2, 12) for row in shares])


@dataclass(frozen=True)
class LabelAgreement:
    """Agreement of weights with label similarity, over the clients that received anything from others.

    Attributes:
        correlation: Spearman's rank correlation; None if weights or similarities are constant.
        share: part of the weights of others that came from the nearest quarter of the offered clients. None if no
            client received anything from others, or no client had a choice.
        chance: the same part if all others had equal weights.

    """

    correlation: float | None
    share: float | None
    chance: float


def measure_agreement(
    weights: FloatArray,
    similarity: FloatArray,
    rows: Sequence[int] | None = None,
    offered: BoolArray | None = None,
) -> LabelAgreement:
    """Compare weights with label similarity, without the diagonal.

    Args:
        weights: (N, N), rows receive; NaN rows are skipped.
        similarity: label similarity (N, N).
        rows: the receiving clients to look at; default: all.
        offered: (N, N), whose models there were to give to each client; default: everybody's.

    """
    from scipy.stats import spearmanr

    n = len(weights)
    offered = np.ones((n, n), dtype=bool) if offered is None else offered
    all_weights: list[FloatArray] = []
    all_similarities: list[FloatArray] = []
    shares: list[float] = []
    chances: list[float] = []
    for i in range(n) if rows is None else rows:
        others = np.flatnonzero(offered[i] & (np.arange(n) != i))
        row, alike = weights[i, others], similarity[i, others]
        if len(others) < 2 or np.isnan(row).any() or row.sum() < MIN_OTHERS_SHARE:
            continue
        all_weights.append(row)
        all_similarities.append(alike)
        # Ties at the border of the nearest share its places.
        count = max(1, round(NEAREST_SHARE * len(others)))
        nearest = np.zeros(len(others))
        border = np.sort(alike)[-count]
        inside, edge = alike > border, alike == border
        nearest[inside] = 1
        nearest[edge] = (count - inside.sum()) / edge.sum()
        shares.append(float(row @ nearest / row.sum()))
        chances.append(count / len(others))
    if not shares:
        return LabelAgreement(None, None, 1.0)
    a, b = np.concatenate(all_weights), np.concatenate(all_similarities)
    varies = len(a) > 2 and np.ptp(a) > FLAT_WEIGHT and np.ptp(b) > FLAT_WEIGHT
    correlation = float(spearmanr(a, b).statistic) if varies else None
    return LabelAgreement(correlation, float(np.mean(shares)), float(np.mean(chances)))
