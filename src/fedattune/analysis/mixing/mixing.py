"""Mixing matrices of one run: who learns from whom, beside the similarity of the clients' labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...runs.metrics import RunMetrics
from ..compare import BoolArray, FloatArray
from .agreement import FLAT_WEIGHT, LabelAgreement, compute_label_similarity, measure_agreement
from .clusters import Clusters, find_clusters
from .partners import ComponentTrace, MixtureShares, build_trace, compute_shares

MAX_MIXING_CLIENTS = 1_000
"""Clients looked at: matrices grow with their square."""
MAX_TRACED_ROUNDS = 60
"""Rounds looked at for the change of a client's partners."""
ROUNDS_BACK = 50
"""Rounds with matrices that are searched for a client's last row."""


def thin_out(rounds: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` evenly spread rounds, with the first and the last one; of one round, the last."""
    if len(rounds) <= most:
        return list(rounds)
    picked = np.unique(np.linspace(0, len(rounds) - 1, max(most, 1)).round().astype(int))
    return [rounds[i] for i in picked] if most > 1 else [rounds[-1]]


class RoundRows(NamedTuple):
    """The rows of one round, among the clients looked at.

    Attributes:
        receivers: positions of the clients that were given a mixture (R).
        senders: positions of the clients whose models there were to give.
        weights: component -> (R, N); 0 for clients whose models were not there.
        totals: component -> sums of the rows over all clients, looked at or not (R,).
        attacked: component -> sums of the rows over attackers that are not looked at (R,).

    """

    receivers: list[int]
    senders: list[int]
    weights: dict[str, FloatArray]
    totals: dict[str, FloatArray]
    attacked: dict[str, FloatArray]


@dataclass(frozen=True)
class LastRows:
    """Every client's last row at a round.

    Attributes:
        weights: component -> (N, N), rows receive; NaN rows of clients without a row.
        rounds: round of each client's row; None without a row.
        offered: whose models (columns) there were to give to each client (rows), (N, N).
        totals: sums of the rows over all clients, looked at or not, averaged over the components (N,).
        attacked: sums of the rows over attackers that are not looked at, likewise.

    """

    weights: dict[str, FloatArray]
    rounds: list[int | None]
    offered: BoolArray
    totals: FloatArray
    attacked: FloatArray


@dataclass(frozen=True)
class ComponentSummary:
    """One component over all clients.

    Attributes:
        name: the component.
        own: mean share that clients keep of their own model.
        is_even: no client has a partner that stands out.
        agreement: of the weights with label similarity; None if labels are not known.

    """

    name: str
    own: float
    is_even: bool
    agreement: LabelAgreement | None


class MixingAnalysis:
    """The mixing matrices of one run among its evaluated clients.

    Args:
        run: the run.
        always: positions, among the evaluated clients, that are looked at even if there are too many clients.
        with_attackers: whether the attackers of a simulation are looked at too, after the evaluated clients.

    Attributes:
        positions: of the N clients looked at, among the evaluated ones; -1 for attackers.
        names: of the clients looked at; names of attackers say so.
        attackers: names of the run's attackers by number.

    """

    def __init__(self, run: RunMetrics, always: Sequence[int] = (), *, with_attackers: bool = False) -> None:
        self.run = run
        n = len(run.facts["clients"])
        self.positions = list(range(n))
        if n > MAX_MIXING_CLIENTS:
            evenly = np.linspace(0, n - 1, MAX_MIXING_CLIENTS).round().astype(int).tolist()
            self.positions = sorted({*evenly, *always})
        self.names = [str(run.facts["clients"][i]["id"]) for i in self.positions]
        self._index_of = {int(run.eval_ids[position]): i for i, position in enumerate(self.positions)}
        named = run.facts.get("attack", {}).get("attackers", {})
        self.attackers: dict[int, str] = {int(number): name for number, name in named.items()}
        for number, name in self.attackers.items() if with_attackers else ():
            self._index_of[number] = len(self.names)
            self.names.append(f"{name} (attacks)")
            self.positions.append(-1)

    def include_attackers(self) -> "MixingAnalysis":
        """Return the analysis with the attackers among the clients looked at; itself if there are none."""
        honest = [position for position in self.positions if position >= 0]
        return MixingAnalysis(self.run, honest, with_attackers=True) if self.attackers else self

    @cached_property
    def rounds(self) -> list[int]:
        """Rounds with matrices."""
        return list(self.run.mixing)

    def read_round(self, round_: int) -> RoundRows:
        """Read the rows of one round; weights of clients that are not looked at are missing."""
        rows, columns, weights = self.run.mixing.among(round_)
        rows_here = [(k, self._index_of[number]) for k, number in enumerate(rows) if number in self._index_of]
        columns_here = [
            (k, self._index_of[number]) for k, number in enumerate(columns) if number in self._index_of
        ]
        source, receivers = [k for k, _ in rows_here], [i for _, i in rows_here]
        senders = [i for _, i in columns_here]
        hidden = [
            k for k, number in enumerate(columns) if number in self.attackers and number not in self._index_of
        ]
        among, totals, attacked = {}, {}, {}
        for component, matrix in weights.items():
            among[component] = np.zeros((len(receivers), len(self.names)))
            among[component][:, senders] = matrix[np.ix_(source, [k for k, _ in columns_here])]
            totals[component] = matrix[source].sum(1, dtype=np.float64)
            attacked[component] = matrix[np.ix_(source, hidden)].sum(1, dtype=np.float64)
        return RoundRows(receivers, senders, among, totals, attacked)

    def read_last_rows(self, round_: int | None = None, back: int = ROUNDS_BACK) -> LastRows:
        """Read every client's last row at a round, from this round or one of the `back` rounds before.

        Args:
            round_: the round; default: the last one with matrices.
            back: rounds with matrices to look at.

        """
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
            last.attacked[receivers] = np.mean([one[new] for one in rows.attacked.values()], axis=0)
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
        """Tell whether all clients of a round were given the same: nobody learned from anybody in particular."""
        # Round by round: one model for all differs from one round to the next, and so do clients' last rows.
        return all(self._is_same_for_all(round_) for round_ in reversed(self.rounds[-ROUNDS_BACK:]))

    def _is_same_for_all(self, round_: int) -> bool:
        weights = self.run.mixing.among(round_).weights.values()
        # One client alone was given what all would have been, if only its own model was there to give.
        return all(
            float(np.ptp(matrix, axis=0).max()) < FLAT_WEIGHT and (len(matrix) > 1 or matrix.shape[1] == 1)
            for matrix in weights
        )

    @cached_property
    def has_mixtures(self) -> bool:
        """Tell whether clients were given different mixtures."""
        return bool(self.rounds) and not self.is_one_for_all

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
        attackers = self.run.facts["attack"].get("labels")
        return None if attackers is None else np.concatenate([rows, np.array(attackers, dtype=np.float64)])

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
        return ComponentSummary(
            name, float(matrix[receivers, receivers].mean()), is_even, self.compare_with_labels(matrix)
        )

    @cached_property
    def shares(self) -> list[MixtureShares | None]:
        """Each client's last mixture, averaged over the components (N); None for clients without one."""
        if not self.has_mixtures:
            return [None] * len(self.names)
        return [
            None
            if r is None
            else compute_shares(
                self.names, i, r, self.mean[i], float(self.last.totals[i]), float(self.last.attacked[i])
            )
            for i, r in enumerate(self.last.rounds)
        ]

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
                total = float(rows.totals[component][k])
                attacked = float(rows.attacked[component][k])
                shares = compute_shares(self.names, client, r, weights[k], total, attacked)
                mixtures.setdefault(component, []).append(shares)
        return [
            build_trace(name, shares, self.compare_with_labels(self.last.weights[name], client))
            for name, shares in mixtures.items()
        ]
