"""Mixing matrices of one run: partners, clusters, and their agreement with the similarity of the clients' labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runs.metrics import RunMetrics
from ..compare import BoolArray, FloatArray

NEAREST_SHARE = 0.25
"""Share of the other clients that count as alike."""
FLAT_WEIGHT = 1e-6
"""Largest difference of weights that still counts as none."""
MIN_OTHERS_SHARE = 0.01
"""Share of others in a mixture below which a client learned from nobody."""


def compute_label_similarity(labels: FloatArray) -> FloatArray:
    """Compute how alike the label counts (N, classes) of clients are: 1 minus the total variation distance.

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
    weights: FloatArray, similarity: FloatArray, rows: Sequence[int] | None = None, offered: BoolArray | None = None
) -> LabelAgreement:
    """Compare weights with label similarity (N, N), without the diagonal.

    Args:
        weights: (N, N), rows receive; NaN rows are skipped.
        rows: the receiving clients to look at; default: all.
        offered: (N, N), whose models there were to give to each client; default: everybody's.
    """
    n = len(weights)
    offered = np.ones((n, n), dtype=bool) if offered is None else offered
    all_weights, all_similarities = list[FloatArray](), list[FloatArray]()
    shares, chances = list[float](), list[float]()
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
    correlation = float(np.corrcoef(_rank(a), _rank(b))[0, 1]) if varies else None
    return LabelAgreement(correlation, float(np.mean(shares)), float(np.mean(chances)))


def _rank(values: FloatArray) -> FloatArray:
    """Rank values (n,) from 1; equal ones share the mean of their ranks."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (sizes.cumsum() - (sizes - 1) / 2)[group]
    return ranks


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
        own, others: share of the client's own model, and the sum of the shares of the other clients.
        unseen, marked: sums of the shares of clients that are not looked at: honest ones, and marked ones.
        is_even: no partner stands out.
        partners: the other clients with a share, the largest first.
    """

    round: int
    own: float
    others: float
    unseen: float
    is_even: bool
    partners: list[Partner]
    marked: float = 0.0

    @property
    def top(self) -> list[Partner]:
        """The partners with the largest shares; partners that hardly count beside the first are left out."""
        smallest = MIN_PARTNER_RATIO * self.partners[0].weight if self.partners else 0.0
        return [one for one in self.partners[:N_TOP_PARTNERS] if one.weight >= smallest]


@dataclass(frozen=True)
class ComponentTrace:
    """One client's mixtures of one component over the rounds: the last one, and those of the first and a middle round.

    Attributes:
        stable_since: first round looked at since which the top partners are the same; None if no partner stands out.
        agreement: of the last weights with label similarity; None if labels are not known.
    """

    name: str
    last: MixtureShares
    before: list[MixtureShares]
    stable_since: int | None
    agreement: LabelAgreement | None


def compute_shares(
    names: Sequence[str], i: int, round_: int, row: FloatArray, total: float | None = None, marked: float = 0.0
) -> MixtureShares:
    """Compute the shares of client `i` in a round, of the weights (N,) that it was given.

    Args:
        total: sum of its weights over all clients, looked at or not; default: the sum of the row.
        marked: sum of its weights over marked clients that are not looked at.
    """
    others = np.delete(np.arange(len(row)), i)
    order = others[np.argsort(-row[others], kind="stable")]
    weights = row[others]
    mean = abs(float(weights.mean())) if len(weights) else 0.0
    is_even = len(weights) > 1 and float(np.ptp(weights)) <= EVEN_SPREAD * mean + FLAT_WEIGHT
    rest = 0.0 if total is None else total - float(row.sum()) - marked
    return MixtureShares(
        round_,
        float(row[i]),
        float(weights.sum()),
        rest if abs(rest) > MIN_UNSEEN_SHARE else 0.0,
        is_even,
        [Partner(names[k], float(row[k])) for k in order if row[k] > FLAT_WEIGHT],
        marked,
    )


def build_trace(name: str, shares: Sequence[MixtureShares], agreement: LabelAgreement | None) -> ComponentTrace:
    """Build the trace of a component."""
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


MAX_ORDERED_CLIENTS = 600
"""Clients up to which the order within the tree is optimised; more take too long."""
MAX_CLUSTERS = 30
MIN_TIMES_CHANCE = 1.2
"""Minimum ratio of the share that clusters keep to the share by chance; both are shares of the weights of others."""
N_SHUFFLES = 39
"""Shuffled mixtures that must all keep less: one in 40 clusters by chance."""


@dataclass(frozen=True)
class Clusters:
    """Clusters of clients that learn from each other.

    Attributes:
        clients: names of the clients of each cluster.
        share: part of the weights of others that came from the client's own cluster, mean over clients.
        chance: the same part if all others had equal weights. Clients that are alone in their cluster do not count.
        similarity_inside, similarity_between: mean label similarity (0 to 1) of two clients of one cluster, and of
            different ones; None without labels.
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
        share, chance: as in `Clusters`; None if there are none.
    """

    order: list[int]
    clusters: list[int]
    share: float | None = None
    chance: float | None = None


def find_clusters(
    weights: FloatArray, offered: BoolArray, names: Sequence[str], similarity: FloatArray | None
) -> Clusters | None:
    """Find clusters that keep more of the weights (N, N; rows receive) than chance; None if there are none."""
    arrangement = arrange_clients(weights, offered)
    if arrangement.share is None or arrangement.chance is None:
        return None
    numbers = np.array(arrangement.clusters)
    different = numbers[:, None] != numbers
    same = ~different & ~np.eye(len(numbers), dtype=bool)
    in_order = dict.fromkeys(arrangement.clusters[i] for i in arrangement.order)
    clients = [[names[i] for i in np.flatnonzero(numbers == number).tolist()] for number in in_order]
    means = [None if similarity is None else float(similarity[pairs].mean()) for pairs in (same, different)]
    return Clusters(clients, arrangement.share, arrangement.chance, *means)


def arrange_clients(weights: FloatArray, offered: BoolArray) -> Arrangement:
    """Order clients so that neighbours learn from each other, and find their clusters, if any.

    Clusters are found in noise, too. They count only if they keep more of the weights (N, N; rows receive) than the
    clusters of mixtures whose weights are shuffled among the clients that were offered (N, N).
    """
    from scipy.cluster.hierarchy import fcluster

    order, clusters = seriate(weights)
    without = Arrangement(order, [0] * len(order))
    score = _measure_clusters(weights, offered, np.array(clusters))
    if score is None or score[0] < MIN_TIMES_CHANCE * score[1]:
        return without
    for shuffled in _shuffle_rows(weights, offered):
        _, tree = _link(_compute_distance(shuffled))
        by_chance = _measure_clusters(shuffled, offered, fcluster(tree, len(set(clusters)), "maxclust"))
        if by_chance is not None and by_chance[0] - by_chance[1] >= score[0] - score[1] - 1e-9:
            return without
    return Arrangement(order, clusters, *score)


def seriate(similarity: FloatArray) -> tuple[list[int], list[int]]:
    """Order clients by their similarity (N, N), so that alike ones are neighbours, and number their clusters.

    Average linkage over 1 minus the symmetric similarity; the number of clusters, 2 to 30, has the largest
    silhouette. Clients that are all alike are one cluster.

    Returns:
        Positions in order (N), and the number of each client's cluster (N).
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, optimal_leaf_ordering

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
    scores = [measure_silhouette(distance, cut) for cut in cuts]
    best = cuts[int(np.argmax(scores))] if cuts else np.ones(n, dtype=int)
    order = [int(i) for i in leaves_list(tree)]
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(int(best[i]) for i in order))}
    return order, [numbers[int(cluster)] for cluster in best]


def measure_silhouette(distance: FloatArray, clusters: NDArray[np.int_]) -> float:
    """Compute the mean silhouette of at least two clusters, from distances (n, n) and the number of each cluster (n,).

    A client by itself counts 0. The import of scikit-learn, which has the same, takes longer than a whole report.
    """
    numbers, own, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    rows = np.arange(len(clusters))
    sums = distance @ (own[:, None] == np.arange(len(numbers)))
    within = sums[rows, own] / np.maximum(sizes[own] - 1, 1)
    means = sums / sizes
    means[rows, own] = np.inf
    nearest = means.min(axis=1)
    largest = np.maximum(within, nearest)
    is_scored = (sizes[own] > 1) & (largest > 0)
    return float(np.divide(nearest - within, largest, out=np.zeros(len(rows)), where=is_scored).mean())


def _link(distance: FloatArray) -> tuple[FloatArray, FloatArray]:
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    pairs = squareform(distance, checks=False)
    return pairs, linkage(pairs, "average")


def _compute_distance(similarity: FloatArray) -> FloatArray:
    symmetric = np.nan_to_num((similarity + similarity.T) / 2)
    # A client's own weight does not say how alike two others are, so the largest is over pairs.
    largest = symmetric[~np.eye(len(symmetric), dtype=bool)].max()
    distance: FloatArray = np.maximum(largest - symmetric, 0)
    np.fill_diagonal(distance, 0)
    return distance


def _measure_clusters(
    weights: FloatArray, offered: BoolArray, clusters: NDArray[np.int_]
) -> tuple[float, float] | None:
    """Measure the share of others' weights inside clusters, and by chance; None where nobody had a choice."""
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


MAX_MIXING_CLIENTS = 1_000
"""Clients looked at: matrices grow with their square."""
MAX_TRACED_ROUNDS = 60
"""Rounds looked at for the change of a client's partners."""
ROUNDS_BACK = 50
"""Rounds with matrices that are searched for a client's last row."""


def thin_out(rounds: Sequence[int], maximum: int) -> list[int]:
    """Pick up to `maximum` evenly spread rounds, with the first and the last one; the last one if it is 1."""
    if len(rounds) <= maximum:
        return list(rounds)
    picked = np.unique(np.linspace(0, len(rounds) - 1, max(maximum, 1)).round().astype(int))
    return [rounds[i] for i in picked] if maximum > 1 else [rounds[-1]]


class RoundRows(NamedTuple):
    """The rows of one round, among the clients looked at.

    Attributes:
        receivers: positions of the clients that were given a mixture (R).
        senders: positions of the clients whose models there were to give.
        weights: component -> (R, N); 0 for clients whose models were not there.
        totals, marked: component -> sums of the rows (R,) over all clients, looked at or not, and over marked clients
            that are not looked at.
    """

    receivers: list[int]
    senders: list[int]
    weights: dict[str, FloatArray]
    totals: dict[str, FloatArray]
    marked: dict[str, FloatArray]


@dataclass(frozen=True)
class LastRows:
    """Every client's last row at a round.

    Attributes:
        weights: component -> (N, N), rows receive; NaN rows of clients without a row.
        rounds: round of each client's row; None without a row.
        offered: whose models (columns) there were to give to each client (rows), (N, N).
        totals, marked: as in `RoundRows`, averaged over the components (N,).
    """

    weights: dict[str, FloatArray]
    rounds: list[int | None]
    offered: BoolArray
    totals: FloatArray
    marked: FloatArray


@dataclass(frozen=True)
class ComponentSummary:
    """One component over all clients: the mean share that they keep of their own model, whether no client has a partner
    that stands out, and the agreement of the weights with label similarity, if labels are known.
    """

    name: str
    own: float
    is_even: bool
    agreement: LabelAgreement | None


class MixingAnalysis:
    """The mixing matrices of one run among its evaluated clients.

    Args:
        always: positions, among the evaluated clients, that are looked at even if there are too many clients.
        with_marked: whether the marked clients are looked at too, after the evaluated clients.

    Attributes:
        positions: of the N clients looked at, among the evaluated ones; -1 for marked clients.
        names: of the clients looked at; names of marked clients have their mark.
        marked: names of the run's marked clients by number: they take part, and nobody evaluates them.
        group: what they are called in tables.
    """

    def __init__(self, run: RunMetrics, always: Sequence[int] = (), *, with_marked: bool = False) -> None:
        self.run = run
        n = len(run.facts["clients"])
        self.positions = list(range(n))
        if n > MAX_MIXING_CLIENTS:
            evenly = np.linspace(0, n - 1, MAX_MIXING_CLIENTS).round().astype(int).tolist()
            self.positions = sorted({*evenly, *always})
        self.names = [str(run.facts["clients"][i]["id"]) for i in self.positions]
        self._index_of = {int(run.eval_ids[position]): i for i, position in enumerate(self.positions)}
        self._mark: dict[str, Any] = run.facts.get("marked", {})
        self.group = str(self._mark.get("group", ""))
        named = self._mark.get("clients", {})
        self.marked: dict[int, str] = {int(number): name for number, name in named.items()}
        for number, name in self.marked.items() if with_marked else ():
            self._index_of[number] = len(self.names)
            self.names.append(f"{name} ({self._mark['mark']})")
            self.positions.append(-1)

    def include_marked(self) -> "MixingAnalysis":
        """Return the analysis with the marked clients among the clients looked at; itself if there are none."""
        honest = [position for position in self.positions if position >= 0]
        return MixingAnalysis(self.run, honest, with_marked=True) if self.marked else self

    @cached_property
    def rounds(self) -> list[int]:
        """Rounds with matrices."""
        return list(self.run.mixing)

    def read_round(self, round_: int) -> RoundRows:
        """Read the rows of one round; weights of clients that are not looked at are missing."""
        rows, columns, weights = self.run.mixing.among(round_)
        rows_here = [(k, self._index_of[number]) for k, number in enumerate(rows) if number in self._index_of]
        columns_here = [(k, self._index_of[number]) for k, number in enumerate(columns) if number in self._index_of]
        source, receivers = [k for k, _ in rows_here], [i for _, i in rows_here]
        senders = [i for _, i in columns_here]
        hidden = [k for k, number in enumerate(columns) if number in self.marked and number not in self._index_of]
        among, totals, marked = {}, {}, {}
        for component, matrix in weights.items():
            among[component] = np.zeros((len(receivers), len(self.names)))
            among[component][:, senders] = matrix[np.ix_(source, [k for k, _ in columns_here])]
            totals[component] = matrix[source].sum(1, dtype=np.float64)
            marked[component] = matrix[np.ix_(source, hidden)].sum(1, dtype=np.float64)
        return RoundRows(receivers, senders, among, totals, marked)

    def read_last_rows(self, round_: int | None = None, back: int = ROUNDS_BACK) -> LastRows:
        """Read every client's last row at a round (default: the last one), or in one of the `back` rounds before."""
        n = len(self.names)
        last = LastRows({}, [None] * n, np.zeros((n, n), dtype=bool), np.full(n, np.nan), np.full(n, 0.0))
        rounds = [r for r in self.rounds if round_ is None or r <= round_]
        for r in reversed(rounds[-back:]):
            rows = self.read_round(r)
            new = [k for k, i in enumerate(rows.receivers) if last.rounds[i] is None]
            receivers = [rows.receivers[k] for k in new]
            for component, weights in rows.weights.items():
                last.weights.setdefault(component, np.full((n, n), np.nan))[receivers] = weights[new]
            last.offered[np.ix_(receivers, rows.senders)] = True
            last.totals[receivers] = np.mean([total[new] for total in rows.totals.values()], axis=0)
            last.marked[receivers] = np.mean([one[new] for one in rows.marked.values()], axis=0)
            for i in receivers:
                last.rounds[i] = r
            if None not in last.rounds:
                break
        return last

    @cached_property
    def last(self) -> LastRows:
        """Every client's last row of the run."""
        return self.read_last_rows()

    @cached_property
    def is_one_for_all(self) -> bool:
        """True if all clients of a round received the same model: nobody learned from anybody in particular."""
        # Round by round: one model for all differs from one round to the next, and so do clients' last rows.
        # One client alone was given what all would have been, if only its own model was there to give.
        return all(
            float(np.ptp(matrix, axis=0).max()) < FLAT_WEIGHT and (len(matrix) > 1 or matrix.shape[1] == 1)
            for round_ in reversed(self.rounds[-ROUNDS_BACK:])
            for matrix in self.run.mixing.among(round_).weights.values()
        )

    @cached_property
    def has_mixtures(self) -> bool:
        """True if clients received different mixtures."""
        has_any = any(r is not None for r in self.last.rounds) if self.rounds else False  # of the evaluated clients
        return has_any and not self.is_one_for_all

    @cached_property
    def mean(self) -> FloatArray:
        """The last weights (N, N), averaged over the components."""
        mean: FloatArray = np.mean(np.stack(list(self.last.weights.values())), axis=0)
        return mean

    @cached_property
    def labels(self) -> FloatArray | None:
        """Samples of each class (N, classes); None if the run does not know them."""
        counts = self.run.facts.get("labels")
        if counts is None:
            return None
        honest = [position for position in self.positions if position >= 0]
        rows = np.array(counts, dtype=np.float64)[honest]
        if len(honest) == len(self.positions):
            return rows
        marked = self._mark.get("labels")
        return None if marked is None else np.concatenate([rows, np.array(marked, dtype=np.float64)])

    @cached_property
    def similarity(self) -> FloatArray | None:
        """Label similarity (N, N); None if labels are not known."""
        return None if self.labels is None else compute_label_similarity(self.labels)

    def compare_with_labels(self, weights: FloatArray, client: int | None = None) -> LabelAgreement | None:
        """Compare last weights (N, N) with label similarity, over one client (its row) or all."""
        if self.similarity is None:
            return None
        rows = None if client is None else [client]
        return measure_agreement(weights, self.similarity, rows, self.last.offered)

    @cached_property
    def components(self) -> list[ComponentSummary]:
        """All components, over all clients; none if there are no mixtures."""
        return [self._summarize(*one) for one in self.last.weights.items()] if self.has_mixtures else []

    def _summarize(self, name: str, matrix: FloatArray) -> ComponentSummary:
        receivers = np.flatnonzero(~np.isnan(matrix).any(1)).tolist()
        is_even = all(compute_shares(self.names, i, 0, matrix[i]).is_even for i in receivers)
        own = float(matrix[receivers, receivers].mean())
        return ComponentSummary(name, own, is_even, self.compare_with_labels(matrix))

    @cached_property
    def shares(self) -> list[MixtureShares | None]:
        """Each client's last mixture, averaged over the components (N); None for clients without one."""
        shares: list[MixtureShares | None] = [None] * len(self.names)
        for i, r in enumerate(self.last.rounds if self.has_mixtures else ()):
            if r is not None:
                total, marked = float(self.last.totals[i]), float(self.last.marked[i])
                shares[i] = compute_shares(self.names, i, r, self.mean[i], total, marked)
        return shares

    @cached_property
    def clusters(self) -> Clusters | None:
        """Clients that learn from each other more than by chance, if there are any."""
        if not self.has_mixtures:
            return None
        return find_clusters(self.mean, self.last.offered, self.names, self.similarity)

    def trace(self, client: int) -> list[ComponentTrace]:
        """Trace the mixtures of one client, by its position; none if it took part in no stored round."""
        last = self.last.rounds[client]
        if last is None:
            return []
        mixtures: dict[str, list[MixtureShares]] = {}
        for r in sorted({*thin_out(self.rounds, MAX_TRACED_ROUNDS), last}):
            rows = self.read_round(r)
            if client not in rows.receivers:
                continue
            k = rows.receivers.index(client)
            for component, weights in rows.weights.items():
                total, marked = float(rows.totals[component][k]), float(rows.marked[component][k])
                shares = compute_shares(self.names, client, r, weights[k], total, marked)
                mixtures.setdefault(component, []).append(shares)
        return [
            build_trace(name, shares, self.compare_with_labels(self.last.weights[name], client))
            for name, shares in mixtures.items()
        ]
