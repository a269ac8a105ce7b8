"""Who learns from whom: what the mixing matrices of a run say, beside how alike the clients' labels are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..training.metrics import RunMetrics

FloatArray = NDArray[np.float64]


BoolArray = NDArray[np.bool_]


NEAREST_SHARE = 0.25
"""The share of the other clients that count as alike."""


MAX_MIXING_CLIENTS = 1_000
"""Clients among whom relations are looked at: matrices grow with their square."""


MAX_ORDERED_CLIENTS = 600
"""Clients up to whom rows are put in the best order within their tree; more take too long."""


MAX_CLUSTERS = 30
"""Clusters that clients are put into."""


FLAT_WEIGHT = 1e-6
"""Differences of weights below which all clients were given the same."""


MIN_OTHERS_SHARE = 0.01
"""Share of others in a mixture below which a client learned from nobody, so that it cannot be said from whom."""


ROUNDS_BACK = 50
"""Rounds with matrices in which a client's last row is looked for."""


def thin_out(rounds: Sequence[int], most: int) -> list[int]:
    """At most `most` of some rounds, evenly spread, the first and the last one among them; the last one of one."""
    if len(rounds) <= most:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, max(most, 1)).round().astype(int))
    return [rounds[i] for i in places] if most > 1 else [rounds[-1]]


def compute_label_similarity(labels: FloatArray) -> FloatArray:
    """How alike label distributions are, (N, N) from counts (N, classes): 1 minus the total variation distance.

    1: the same shares of every class; 0: no class in common.
    """
    shares = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    # Clients that are equally alike on paper are so here, for ranks and nearest ones depend on it.
    return np.stack([np.round(1 - np.abs(shares - row).sum(1) / 2, 12) for row in shares])


def seriate(similarity: FloatArray) -> tuple[list[int], list[int]]:
    """An order of clients in which those that are alike are neighbours, and the cluster of each client.

    Average linkage over 1 minus the symmetric similarity (N, N); the number of clusters, 2 to 30, is that of the
    largest silhouette. Clients that are all alike are one cluster.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import squareform
    from sklearn.metrics import silhouette_score

    n = len(similarity)
    if n < 3:
        return list(range(n)), [0] * n
    distance = _compute_distance(similarity)
    if np.ptp(distance[~np.eye(n, dtype=bool)]) < 1e-12:
        return list(range(n)), [0] * n
    flat = squareform(distance, checks=False)
    tree = linkage(flat, "average")
    if n <= MAX_ORDERED_CLIENTS:
        tree = optimal_leaf_ordering(tree, flat)
    found = [fcluster(tree, k, "maxclust") for k in range(2, min(MAX_CLUSTERS, n - 1) + 1)]
    scored = [
        (float(silhouette_score(distance, one, metric="precomputed")), one)
        for one in found
        if 1 < len(set(one)) < n
    ]
    clusters = max(scored, key=lambda pair: pair[0])[1] if scored else np.ones(n, dtype=int)
    order = [int(i) for i in leaves_list(tree)]
    names = {c: number for number, c in enumerate(dict.fromkeys(int(clusters[i]) for i in order))}
    return order, [names[int(c)] for c in clusters]


def cut_clusters(similarity: FloatArray, count: int) -> NDArray[np.int_]:
    """The cluster of each of three or more clients, as `seriate` finds them, where there are to be `count`, (N,)."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(_compute_distance(similarity), checks=False), "average")
    found: NDArray[np.int_] = fcluster(tree, count, "maxclust")
    return found


def _compute_distance(similarity: FloatArray) -> FloatArray:
    """How far clients are apart (N, N), 0 for the two that are most alike."""
    symmetric = np.nan_to_num((similarity + similarity.T) / 2)
    # What a client has of its own says nothing of how alike two others are, so the largest is one of two clients.
    distance: FloatArray = np.maximum(symmetric[~np.eye(len(symmetric), dtype=bool)].max() - symmetric, 0)
    np.fill_diagonal(distance, 0)
    return distance


@dataclass(frozen=True)
class LabelAgreement:
    """How weights for others agree with the similarity of labels, of those clients that were given any of others.

    `correlation` is Spearman's, None where one of both is constant; `share` is how much of what came from others came
    from the alike (the nearest quarter of the others whose models there were to give), and `chance` what it would be if
    all of these counted the same. All are None or 1 where nobody was given anything of others, or had no choice.
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
    """Compare weights (N, N) with label similarity (N, N) without the diagonal, over some rows or all known ones.

    `offered` (N, N) says whose models there were to give to each client; without it, everybody's.
    """
    from scipy.stats import spearmanr

    n = len(weights)
    offered = np.ones((n, n), dtype=bool) if offered is None else offered
    given: list[FloatArray] = []
    alike: list[FloatArray] = []
    shares: list[float] = []
    chances: list[float] = []
    for i in range(n) if rows is None else rows:
        others = np.flatnonzero(offered[i] & (np.arange(n) != i))
        row, near = weights[i, others], similarity[i, others]
        if len(others) < 2 or np.isnan(row).any() or row.sum() < MIN_OTHERS_SHARE:
            continue
        given.append(row)
        alike.append(near)
        # Ties at the border of the nearest share its places.
        count = max(1, round(NEAREST_SHARE * len(others)))
        nearest = np.zeros(len(others))
        border = np.sort(near)[-count]
        inside, edge = near > border, near == border
        nearest[inside] = 1
        nearest[edge] = (count - inside.sum()) / edge.sum()
        shares.append(float(row @ nearest / row.sum()))
        chances.append(count / len(others))
    a, b = np.concatenate(given or [np.zeros(0)]), np.concatenate(alike or [np.zeros(0)])
    varied = len(a) > 2 and np.ptp(a) > FLAT_WEIGHT and np.ptp(b) > FLAT_WEIGHT
    return LabelAgreement(
        float(spearmanr(a, b).statistic) if varied else None,
        float(np.mean(shares)) if shares else None,
        float(np.mean(chances)) if chances else 1.0,
    )


class MixingAnalysis:
    """The mixing matrices of one run among its evaluated clients, of every round in which any are stored.

    `one_for_all`: all clients were given the same in every round looked at, so that nobody learned from anybody in
    particular.
    """

    def __init__(self, run: RunMetrics, always: Sequence[int] = ()) -> None:
        self.run = run
        n = len(run.facts["clients"])
        self.places = list(range(n))
        """Which of the evaluated clients, by their places among these: of more than MOST, some, with `always` in it."""
        if n > MAX_MIXING_CLIENTS:
            spread = np.linspace(0, n - 1, MAX_MIXING_CLIENTS).round().astype(int).tolist()
            self.places = sorted({*spread, *always})
        self.numbers = np.array(list(run._numbers), dtype=np.int64)[self.places]
        self.names = [str(run.facts["clients"][i]["id"]) for i in self.places]
        self._place = {int(number): i for i, number in enumerate(self.numbers)}

    @cached_property
    def rounds(self) -> list[int]:
        """Rounds with matrices."""
        return list(self.run.mixing)

    def at(self, round_: int) -> dict[str, FloatArray]:
        """Component -> (N, N) of one round; rows of clients that were given nothing in it are NaN.

        What clients gave that are not among the evaluated ones is missing from the rows, which then sum to less.
        """
        rows, columns, weights = self.run.mixing.among(round_)
        n = len(self.numbers)
        here = [(i, self._place[r]) for i, r in enumerate(rows) if r in self._place]
        there = [(k, self._place[c]) for k, c in enumerate(columns) if c in self._place]
        out: dict[str, FloatArray] = {}
        for component, matrix in weights.items():
            full = np.full((n, n), np.nan)
            if here:
                full[[to for _, to in here]] = 0
            if here and there:
                source = np.ix_([i for i, _ in here], [k for k, _ in there])
                full[np.ix_([to for _, to in here], [to for _, to in there])] = matrix[source]
            out[component] = full
        return out

    def known(self, round_: int, back: int = ROUNDS_BACK) -> dict[str, FloatArray]:
        """Component -> (N, N): every client's last row at a round, from that one or one of the `back` before it."""
        last: dict[str, FloatArray] = {}
        for r in reversed([r for r in self.rounds if r <= round_][-back:]):
            for component, matrix in self.at(r).items():
                later = last.setdefault(component, np.full_like(matrix, np.nan))
                unknown = np.isnan(later).all(1)
                later[unknown] = matrix[unknown]
            if not any(np.isnan(matrix).all(1).any() for matrix in last.values()):
                break
        return last

    def since(self, round_: int, back: int = ROUNDS_BACK) -> list[int | None]:
        """Of every client the round that its row in `known` is from; None where it has none."""
        found: list[int | None] = [None] * len(self.numbers)
        for r in [r for r in self.rounds if r <= round_][-back:]:
            for number in self.run.mixing.among(r).rows:
                if number in self._place:
                    found[self._place[number]] = r
        return found

    @cached_property
    def offered(self) -> BoolArray:
        """Whose models (columns) there were to give to each client (rows) in the round of its last row, (N, N)."""
        n = len(self.numbers)
        found = np.zeros((n, n), dtype=bool)
        for r in self.rounds[-ROUNDS_BACK:]:
            rows, columns, _ = self.run.mixing.among(r)
            here = [self._place[number] for number in rows if number in self._place]
            there = [self._place[number] for number in columns if number in self._place]
            found[here] = False
            found[np.ix_(here, there)] = True
        return found

    @cached_property
    def last(self) -> dict[str, FloatArray]:
        """Component -> (N, N): every client's last known row."""
        return self.known(self.rounds[-1]) if self.rounds else {}

    @cached_property
    def one_for_all(self) -> bool:
        """Whether all clients that took part in a round were given the same."""
        # Round by round: one model for all differs from one round to the next, and so do clients' last rows.
        return all(self._alike(round_) for round_ in reversed(self.rounds[-ROUNDS_BACK:]))

    def _alike(self, round_: int) -> bool:
        """Whether all clients of one round were given the same."""
        weights = self.run.mixing.among(round_).weights.values()
        # One client alone was given what all would have been, if only its own model was there to give.
        return all(
            float(np.ptp(matrix, axis=0).max()) < FLAT_WEIGHT and (len(matrix) > 1 or matrix.shape[1] == 1)
            for matrix in weights
        )

    @property
    def mixes(self) -> bool:
        """Whether there is something to see: clients that were given different mixtures."""
        return bool(self.last) and not self.one_for_all

    @cached_property
    def mean(self) -> FloatArray:
        """The last known weights (N, N), averaged over the components."""
        mean: FloatArray = np.mean(np.stack(list(self.last.values())), axis=0)
        return mean

    @cached_property
    def labels(self) -> FloatArray | None:
        """Samples of each class (N, classes); None where the run's store does not know them."""
        found = self.run.facts.get("labels")
        return None if found is None else np.array(found, dtype=np.float64)[self.places]

    @cached_property
    def similarity(self) -> FloatArray | None:
        """How alike the clients' label distributions are (N, N); None where these are not known."""
        return None if self.labels is None else compute_label_similarity(self.labels)

    def agreement(self, client: int | None = None) -> dict[str, LabelAgreement]:
        """Component -> how the last weights agree with the similarity of labels, of one client (its row) or of all."""
        if self.similarity is None:
            return {}
        rows = None if client is None else [client]
        return {
            name: measure_agreement(matrix, self.similarity, rows, self.offered)
            for name, matrix in self.last.items()
        }
