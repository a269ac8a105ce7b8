"""Group clients whose classes look alike, by the rows of their updates of the last layer.

A step on a sample with features f and label y changes row c of the last layer by lr (1[c = y] - p_c) f. So row c of the
sum H_i of a client's updates tells what the client calls c. `split_rows` takes the direction that all features share
out of the rows; the rest is a prototype u_ic of each class, and q_ic tells how much of the class the client holds:

    likeness_ik = sum_c q_ic q_kc cos(u_ic, u_kc) / sum_c q_ic q_kc

Clients with other classes have nothing to compare, clients that call other samples c have a likeness near zero. That
tells different labels from different tasks, which the cosine of whole updates does not.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

POWER_STEPS = 10
"""Steps of the power iteration for the shared direction."""

UNKNOWN, WEIGHT_OF_UNKNOWN = 0.5, 0.05
"""Likeness of clients without a common class, and the evidence for which it counts; all common classes count 1."""

import os
LEAST_OF_OWN = float(os.environ.get('RATIO','0.35'))
"""Least likeness of two groups that become one, as a ratio to the likeness within the less coherent one."""


def split_rows(updates: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into their parts along the direction that all features share, and the rest.

    Args:
        updates: (N, C, F) updates of the last layer.

    Returns:
        How much of each class a client holds, max(a, 0) (N, C), and prototypes u (N, C, F).

    """
    rows = updates.flatten(0, 1)
    direction = rows[int(rows.norm(dim=1).argmax())]
    for _ in range(POWER_STEPS):
        direction = torch.mv(rows.T, torch.mv(rows, direction))
        direction = direction / direction.norm().clamp_min(1e-30)
    along = updates @ direction
    # A client holds few classes, whose rows grow much; all other rows shrink a little.
    if along.clamp_min(0).square().sum() < along.clamp_max(0).square().sum():
        along, direction = -along, -direction
    return along.clamp_min(0), updates - along[..., None] * direction


def compare_classes(updates: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the classes of clients.

    Args:
        updates: (K, C, F) sums of the updates of the last layer.

    Returns:
        The likeness of each pair times its evidence (K, K), and the evidence (K, K), which is 1 at most.

    """
    lengths = updates.flatten(1).norm(dim=1).clamp_min(1e-30)
    updates = updates / lengths[:, None, None]
    if updates.shape[1] == 2:  # the two rows are opposite, and say the same
        row = functional.normalize(updates[:, 1] - updates[:, 0], dim=1)
        return row @ row.T, torch.ones(len(row), len(row), dtype=row.dtype, device=row.device)
    held, rest = split_rows(updates)
    lengths = rest.norm(dim=2)
    weights = functional.normalize(held * lengths, dim=1)
    scaled = rest / lengths.clamp_min(1e-30)[..., None] * weights[..., None]
    return torch.einsum("icf,kcf->ik", scaled, scaled), weights @ weights.T


def group_clients(likeness: Tensor, evidence: Tensor, least: float) -> NDArray[np.int64]:
    """Join the two most similar groups again and again: average linkage, in which pairs count by their evidence.

    Args:
        likeness: (K, K) likeness of each pair times its evidence.
        evidence: (K, K) evidence.
        least: least likeness of two groups that become one.

    Returns:
        (K,) number of each client's group, from 0 in the order of the groups' first clients.

    """
    total, weight = (m.double().cpu().numpy().copy() for m in (likeness, evidence))
    n = len(total)
    np.fill_diagonal(total, 0.0)
    np.fill_diagonal(weight, 0.0)
    own_total, own_weight = np.zeros(n), np.zeros(n)
    group, alive = np.arange(n), np.ones(n, dtype=np.bool_)

    def rate(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        rated: NDArray[np.float64] = (a + WEIGHT_OF_UNKNOWN * UNKNOWN) / (b + WEIGHT_OF_UNKNOWN)
        return rated

    score = rate(total, weight)
    np.fill_diagonal(score, -np.inf)
    while alive.sum() > 1:
        i, j = sorted(np.unravel_index(int(score.argmax()), score.shape))
        within = rate(own_total[[i, j]], own_weight[[i, j]]).min() if own_weight[[i, j]].all() else 0.0
        if not score[i, j] >= max(least, LEAST_OF_OWN * within):
            if not np.isfinite(score[i, j]) or score[i, j] < least:
                break
            score[i, j] = score[j, i] = -np.inf  # these two stay apart, others may still become one
            continue
        own_total[i] += own_total[j] + total[i, j]
        own_weight[i] += own_weight[j] + weight[i, j]
        for matrix in (total, weight):
            matrix[i] += matrix[j]
            matrix[:, i] += matrix[:, j]
            matrix[i, i] = 0.0
        group[group == j] = i
        alive[j] = False
        score[i] = score[:, i] = np.where(alive, rate(total[i], weight[i]), -np.inf)
        score[j] = score[:, j] = -np.inf
        score[i, i] = -np.inf
    return np.unique(group, return_inverse=True)[1].astype(np.int64)
