"""Clusters of clients that learn from each other, and an order in which such clients are neighbours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..compare import BoolArray, FloatArray
from .agreement import MIN_OTHERS_SHARE

MAX_ORDERED_CLIENTS = 600
"""Clients up to which the order within the tree is optimised; more take too long."""
MAX_CLUSTERS = 30
MIN_TIMES_CHANCE = 1.2
"""Least ratio of the share that clusters keep to the share by chance; both are shares of the weights of others."""
N_SHUFFLES = 39
"""Shuffled mixtures that must all keep less: one in 40 clusters by chance."""


@dataclass(frozen=True)
class Clusters:
    """Clusters of clients that learn from each other.

    Attributes:
        clients: names of the clients of each cluster.
        share: part of the weights of others that came from the client's own cluster, mean over clients.
        chance: the same part if all others had equal weights. Clients that are alone in their cluster do not count.
        similarity_inside: mean label similarity (0 to 1) of two clients of one cluster; None without labels.
        similarity_between: the same of two clients of different clusters.

    """

    clients: list[list[str]]
    share: float
    chance: float
    similarity_inside: float | None
    similarity_between: float | None


@dataclass(frozen=True)
class Arrangement:
    """An order of clients and their clusters.

    Attributes:
        order: positions of the clients; clients that learn from each other are neighbours.
        clusters: number of the cluster of each client; all 0 if there are no clusters.
        share: as in `Clusters`; None if there are none.
        chance: as in `Clusters`; None if there are none.

    """

    order: list[int]
    clusters: list[int]
    share: float | None = None
    chance: float | None = None


def find_clusters(
    weights: FloatArray, offered: BoolArray, names: Sequence[str], similarity: FloatArray | None
) -> Clusters | None:
    """Find clusters that keep more than chance; None if there are none.

    Args:
        weights: (N, N), rows receive.
        offered: (N, N), whose models there were to give.
        names: of the clients (N).
        similarity: label similarity (N, N), where labels are known.

    """
    arrangement = arrange_clients(weights, offered)
    if arrangement.share is None or arrangement.chance is None:
        return None
    numbers = np.array(arrangement.clusters)
    same = (numbers[:, None] == numbers) & ~np.eye(len(numbers), dtype=bool)
    apart = numbers[:, None] != numbers
    in_order = dict.fromkeys(arrangement.clusters[i] for i in arrangement.order)
    clients = [[names[i] for i in np.flatnonzero(numbers == number).tolist()] for number in in_order]
    means = [None if similarity is None else float(similarity[pairs].mean()) for pairs in (same, apart)]
    return Clusters(clients, arrangement.share, arrangement.chance, *means)


def arrange_clients(weights: FloatArray, offered: BoolArray) -> Arrangement:
    """Order clients so that neighbours learn from each other, and find their clusters, if any.

    Clusters are found in noise, too. They count only if they keep more than the clusters of mixtures whose weights
    are shuffled among the clients that were offered.

    Args:
        weights: (N, N), rows receive.
        offered: (N, N), whose models there were to give.

    """
    order, clusters = seriate(weights)
    without = Arrangement(order, [0] * len(order))
    score = _measure_clusters(weights, offered, np.array(clusters))
    if score is None or score[0] < MIN_TIMES_CHANCE * score[1]:
        return without
    for shuffled in _shuffle_rows(weights, offered):
        by_chance = _measure_clusters(shuffled, offered, cut_clusters(shuffled, len(set(clusters))))
        if by_chance is not None and by_chance[0] - by_chance[1] >= score[0] - score[1] - 1e-9:
            return without
    return Arrangement(order, clusters, *score)


def seriate(similarity: FloatArray) -> tuple[list[int], list[int]]:
    """Order clients so that alike ones are neighbours, and number their clusters.

    Average linkage over 1 minus the symmetric similarity; the number of clusters, 2 to 30, has the largest
    silhouette. Clients that are all alike are one cluster.

    Args:
        similarity: (N, N).

    Returns:
        Positions in order (N), and the number of each client's cluster (N).

    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, optimal_leaf_ordering
    from sklearn.metrics import silhouette_score

    n = len(similarity)
    if n < 3:
        return list(range(n)), [0] * n
    distance = _compute_distance(similarity)
    if np.ptp(distance[~np.eye(n, dtype=bool)]) < 1e-12:
        return list(range(n)), [0] * n
    pairs, tree = _link(distance)
    if n <= MAX_ORDERED_CLIENTS:
        tree = optimal_leaf_ordering(tree, pairs)
    cuts = [fcluster(tree, k, "maxclust") for k in range(2, min(MAX_CLUSTERS, n - 1) + 1)]
    cuts = [cut for cut in cuts if 1 < len(set(cut)) < n]
    scores = [float(silhouette_score(distance, cut, metric="precomputed")) for cut in cuts]
    best = cuts[int(np.argmax(scores))] if cuts else np.ones(n, dtype=int)
    order = [int(i) for i in leaves_list(tree)]
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(int(best[i]) for i in order))}
    return order, [numbers[int(cluster)] for cluster in best]


def cut_clusters(similarity: FloatArray, count: int) -> NDArray[np.int_]:
    """Cut the tree of `seriate` over three or more clients into `count` clusters; return the cluster of each (N,)."""
    from scipy.cluster.hierarchy import fcluster

    _, tree = _link(_compute_distance(similarity))
    clusters: NDArray[np.int_] = fcluster(tree, count, "maxclust")
    return clusters


def _link(distance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the distances of all pairs, and the tree of average linkage over them."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    pairs = squareform(distance, checks=False)
    return pairs, linkage(pairs, "average")


def _compute_distance(similarity: FloatArray) -> FloatArray:
    """Compute how far clients are apart (N, N), 0 for the two that are most alike."""
    symmetric = np.nan_to_num((similarity + similarity.T) / 2)
    # A client's own weight does not say how alike two others are, so the largest is over pairs.
    largest = symmetric[~np.eye(len(symmetric), dtype=bool)].max()
    distance: FloatArray = np.maximum(largest - symmetric, 0)
    np.fill_diagonal(distance, 0)
    return distance


def _measure_clusters(
    weights: FloatArray, offered: BoolArray, clusters: NDArray[np.int_]
) -> tuple[float, float] | None:
    """Measure the share of others' weights kept in clusters, and by chance; None where nobody had a choice."""
    others = offered & ~np.eye(len(clusters), dtype=bool)
    same = others & (clusters[:, None] == clusters)
    totals = np.where(others, weights, 0).sum(1)
    # A client by itself has nobody to learn from in its cluster.
    has_choice = same.any(1) & ~np.isnan(weights).any(1) & (totals >= MIN_OTHERS_SHARE)
    if not has_choice.any() or not (others & ~same)[has_choice].any():
        return None
    share = np.where(same, weights, 0).sum(1)[has_choice] / totals[has_choice]
    chance = same.sum(1)[has_choice] / others.sum(1)[has_choice]
    return float(share.mean()), float(chance.mean())


def _shuffle_rows(weights: FloatArray, offered: BoolArray) -> Iterator[FloatArray]:
    """Shuffle the weights of each row among the others that were offered to it."""
    generator = np.random.default_rng(0)
    choices = [np.flatnonzero(row) for row in offered & ~np.eye(len(weights), dtype=bool)]
    for _ in range(N_SHUFFLES):
        shuffled = weights.copy()
        for i, columns in enumerate(choices):
            shuffled[i, columns] = generator.permutation(weights[i, columns])
        yield shuffled
