"""Group clients whose classes look alike, by the rows of their updates of the last layer.

A step on a sample with features f and label y changes row c of the last layer by lr (1[c = y] - p_c) f. So row c of the
sum H_i of a client's updates tells what the client calls c. `split_rows` takes the direction that all features share
out of the rows; the rest is a prototype u_ic of each class, and q_ic tells how much of the class the client holds:

    likeness_ik = sum_c q_ic q_kc cos(u_ic, u_kc) / sum_c q_ic q_kc

Clients with other classes have nothing to compare, clients that call other samples c have a likeness near zero. That
tells different labels from different tasks, which the cosine of whole updates does not. Where a number is predicted,
the only row is compared. Groups must explain the rows, by the F of an analysis of variance: else a common model is
better.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..core.params import Params

MAX_CLASSES, MAX_FEATURES = 100, 512
"""Maximum number of classes, and of features of the last layer, that are compared."""

MAX_COMPARED = 256
"""Maximum number of clients that form groups; the others join one of these."""

POWER_STEPS = 10
"""Steps of the power iteration for the shared direction."""

UNKNOWN, WEIGHT_OF_UNKNOWN = 0.5, 0.05
"""Likeness of clients without a common class, and the evidence for which it counts; all common classes count 1."""

TRUSTED_UPLOADS = 1.0
"""Uploads after which a client's classes count half."""

MIN_F, F_OF_FEW = 1.3, 10.0
"""Minimum ratio of the variance of class rows between groups to the variance within, plus `F_OF_FEW` / K for K clients:
the best of all divisions of few clients has a large one by chance. Below it, all are one group."""

DRAWS = 19
"""Draws of rows that form no groups: what divisions explain by chance where each client has one row."""

MIN_OF_CHANCE = 0.65
"""Minimum ratio of F to the largest one by chance. It is below 1, as clients of a false group can still move, and false
groups merge, but groups that are missed stay so."""

MAX_GROUPS = 6
"""Maximum number of groups."""

REFINEMENTS = 5
"""Maximum number of times that clients join the group that is most similar to them."""

MIN_OF_OWN = 0.4
"""Minimum likeness of two groups that become one, as a ratio to the likeness within the less coherent one."""


def split_rows(updates: Tensor) -> tuple[Tensor, Tensor]:
    """Split updates (N, C, F) of the last layer along the direction that all features share.

    Return how much of each class a client holds, max(a, 0) (N, C), and prototypes u, the rest of the rows (N, C, F).
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


def find_class_rows(w: Params, n_axes: int = 0) -> Tensor | None:
    """Return the rows (..., C, F) of the last layer, one per class or number, with at most `MAX_FEATURES` features.

    Return None if no matrix is there, or the last one has more than `MAX_CLASSES` rows.
    """
    matrices = [v for v in w.values() if v.dim() == n_axes + 2]
    if not matrices or matrices[-1].shape[-2] > MAX_CLASSES:
        return None
    return matrices[-1][..., :: -(-matrices[-1].shape[-1] // MAX_FEATURES)]


def compare_classes(updates: Tensor, trust: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compare the classes of clients by the sums (K, C, F) of their updates of the last layer.

    Client k's rows count by trust[k], from 0 to 1. Return the likeness of each pair times its evidence (K, K), and the
    evidence (K, K), which is 1 at most.
    """
    norms = updates.flatten(1).norm(dim=1).clamp_min(1e-30)
    updates = updates / norms[:, None, None]
    trust = torch.ones_like(norms) if trust is None else trust.to(norms.dtype)
    if updates.shape[1] <= 2:  # two rows are opposite, and say the same
        row = functional.normalize(updates[:, -1] - (updates[:, 0] if updates.shape[1] == 2 else 0), dim=1)
        row = row * trust[:, None]
        return row @ row.T, trust[:, None] * trust
    held, rest = split_rows(updates)
    norms = rest.norm(dim=2)
    weights = functional.normalize(held * norms, dim=1) * trust[:, None]
    scaled = rest / norms.clamp_min(1e-30)[..., None] * weights[..., None]
    return torch.einsum("icf,kcf->ik", scaled, scaled), weights @ weights.T


def group_clients(likeness: Tensor, evidence: Tensor, min_likeness: float) -> list[Tensor]:
    """Join the two most similar groups again and again: average linkage, in which pairs count by their evidence.

    From the likeness of each pair times its evidence (K, K), and the evidence (K, K), return the number of each
    client's group (K,), from 0 in the order of the groups' first clients: for the result, which comes last, and for all
    divisions on the way that have at most `MAX_GROUPS` groups.
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
    found = [group.copy()]
    while alive.sum() > 1:
        i, j = sorted(np.unravel_index(int(score.argmax()), score.shape))
        within = rate(own_total[[i, j]], own_weight[[i, j]]).min() if own_weight[[i, j]].all() else 0.0
        if not score[i, j] >= max(min_likeness, MIN_OF_OWN * within):
            if not np.isfinite(score[i, j]) or score[i, j] < min_likeness:
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
        if alive.sum() < MAX_GROUPS:
            found.append(group.copy())
        else:
            found = [group.copy()]
        score[i] = score[:, i] = np.where(alive, rate(total[i], weight[i]), -np.inf)
        score[j] = score[:, j] = -np.inf
        score[i, i] = -np.inf
    return [torch.from_numpy(np.unique(one, return_inverse=True)[1].astype(np.int64)) for one in found]


def join_groups(likeness: Tensor, evidence: Tensor, found: Tensor) -> Tensor:
    """Return the most similar group (B,) of clients that form none; `found` (K,) are the groups of the others."""
    member = functional.one_hot(found).to(likeness.dtype)
    total, weight = (m @ member for m in (likeness, evidence))
    return ((total + WEIGHT_OF_UNKNOWN * UNKNOWN) / (weight + WEIGHT_OF_UNKNOWN)).argmax(1)


def refine_groups(likeness: Tensor, evidence: Tensor, found: Tensor) -> Tensor:
    """Let each client join the group whose other members are most similar to it; then let those alone join another."""
    likeness, evidence = (m.clone().fill_diagonal_(0.0) for m in (likeness, evidence))
    for _ in range(REFINEMENTS):
        old, found = found, _number(join_groups(likeness, evidence, found))
        if torch.equal(old, found):
            break
    is_alone = found.bincount()[found] < 2
    if is_alone.all():
        return torch.zeros_like(found)
    kept = _number(found[~is_alone])
    joined = torch.empty_like(found)
    joined[~is_alone] = kept
    joined[is_alone] = join_groups(likeness[is_alone][:, ~is_alone], evidence[is_alone][:, ~is_alone], kept)
    return joined


def _number(groups: Tensor) -> Tensor:
    """Number groups from 0."""
    numbers: Tensor = groups.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    return numbers


def find_groups(rows: Tensor, trust: Tensor, old: Tensor, is_new: Tensor, min_likeness: float) -> Tensor:
    """Find the division into groups that explains the rows of K clients best, by its F.

    It is one of those that average linkage passes before it ends, each refined, or the old one. The new ones do not
    count if linkage ends with one group, and all are one group if no division explains enough.

    Args:
        rows: (K, C, F) mean updates of the last layer.
        trust: (K,) how much a client's rows count, from 0 to 1.
        old: (K,) groups before.
        is_new: (K,) clients that had no group before.
        min_likeness: minimum likeness within a group.
    """
    pairs = compare_classes(rows, trust)
    choices = list_divisions(pairs, min_likeness)
    if not is_new.all():
        kept = torch.empty_like(old)
        kept[~is_new] = _number(old[~is_new])
        if is_new.any():
            likeness, evidence = (m[is_new][:, ~is_new] for m in pairs)
            kept[is_new] = join_groups(likeness, evidence, kept[~is_new])
        choices.append(kept)
    if not choices:
        return torch.zeros_like(old)
    explained = [measure_f(rows, one) for one in choices]
    if not np.isfinite(explained).all():  # a client diverged
        return torch.zeros_like(old)
    best = choices[int(np.argmax(explained))]
    if max(explained) < MIN_F + F_OF_FEW / len(rows):
        return torch.zeros_like(old)
    if rows.shape[1] <= 2:
        by_chance = draw_f(rows, trust, best, min_likeness)
        if any(max(explained) <= MIN_OF_CHANCE * f for f in by_chance):  # the first draw often tells
            return torch.zeros_like(old)
    return best


def list_divisions(pairs: tuple[Tensor, Tensor], min_likeness: float) -> list[Tensor]:
    """List the divisions that average linkage passes before it ends, each refined; none if it ends with one group."""
    linked = [one.to(pairs[0].device) for one in group_clients(*pairs, min_likeness)]
    return [refine_groups(*pairs, one) for one in linked] if linked[-1].any() else []


def measure_f(rows: Tensor, found: Tensor) -> float:
    """Return the variance of rows (K, ...) between groups over the variance within, as in an analysis of variance."""
    x, sizes = rows.flatten(1).double(), found.bincount().double()
    n, n_groups = len(x), len(sizes)
    if not 1 < n_groups < n:
        return 0.0
    means = x.new_zeros(n_groups, x.shape[1]).index_add_(0, found, x) / sizes[:, None]
    between = (sizes[:, None] * (means - x.mean(0)).square()).sum() / (n_groups - 1)
    within = (x - means[found]).square().sum() / (n - n_groups)
    return float(between / within.clamp_min(1e-30))


def draw_f(rows: Tensor, trust: Tensor, found: Tensor, min_likeness: float) -> Iterator[float]:
    """Draw rows that form no groups, `DRAWS` times, and return the F of the best division of each.

    The rows are normal, with the mean of the given rows (K, C, F), and their covariance within the groups `found`.
    """
    x, n_groups = rows.flatten(1), int(found.max()) + 1
    means = torch.stack([x[found == g].mean(0) for g in range(n_groups)])
    within = (x - means[found]) / math.sqrt(len(x) - n_groups)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        mixture = torch.randn(len(x), len(x), generator=generator, dtype=torch.float64).to(x)
        drawn = (x.mean(0) + mixture @ within).view_as(rows)
        divisions = list_divisions(compare_classes(drawn, trust), min_likeness)
        yield max((measure_f(drawn, one) for one in divisions), default=0.0)


def place_groups(found: Tensor, old: Tensor, n_places: int) -> tuple[Tensor, Tensor]:
    """Give each group a place among the stored models, so that it goes on with the model that most members had.

    From each client's group (K,) and the place of its group before (K,), return the place of every group (G,), and for
    every place, the place whose model it takes over (n_places,). The smallest groups that find no place share the place
    of the largest.
    """
    sizes = found.bincount()
    order = sizes.argsort(descending=True, stable=True).tolist()
    source = torch.arange(n_places, device=found.device)
    place = torch.full_like(sizes, -1)
    parents = {g: int(old[found == g].mode().values) for g in order}
    free = set(range(n_places))
    for g in order[:n_places]:  # larger groups first: they keep the place
        if parents[g] in free:
            place[g] = parents[g]
            free.discard(parents[g])
    for g in order[:n_places]:
        if place[g] < 0:
            place[g] = min(free)
            free.discard(int(place[g]))
            source[place[g]] = parents[g]
    place[place < 0] = place[order[0]].clone()  # PyTorch before 2.13 refuses a view of what is written
    return place, source


def assign_groups(
    sums: Tensor, n_uploads: Tensor, new: Tensor, group: Tensor, n_places: int, min_likeness: float
) -> tuple[Tensor, Tensor]:
    """Group clients by what they call their classes, and give every group a place among the stored models.

    Args:
        sums: (N, C, F) sums of the updates of the last layer.
        n_uploads: (N,) number of updates in each sum; 0 for a client that is not known.
        new: (B,) clients whose sums are new.
        group: (N,) places of the clients' groups before.

    Returns:
        The places of the clients' groups (N,), an unknown client in the largest; and the `source` of `place_groups`.
    """
    trust = n_uploads / (n_uploads + TRUSTED_UPLOADS)
    compared = n_uploads.nonzero().flatten()[:MAX_COMPARED]
    is_new = (n_uploads[compared] == 1) & torch.isin(compared, new)
    rows = sums[compared] / n_uploads[compared, None, None]
    found = find_groups(rows, trust[compared], group[compared], is_new, min_likeness)
    place, source = place_groups(found, group[compared], n_places)
    group = group.index_copy(0, compared, place[found])
    group = torch.where(trust > 0, group, place[found].mode().values)
    others, n = new[~torch.isin(new, compared)], len(compared)
    for start in range(0, len(others), MAX_COMPARED):
        block = others[start : start + MAX_COMPARED]
        both = torch.cat([compared, block])
        likeness, evidence = compare_classes(sums[both], trust[both])
        group = group.index_copy(0, block, place[join_groups(likeness[n:, :n], evidence[n:, :n], found)])
    return group, source
