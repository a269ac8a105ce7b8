"""Which run is explained, what clients gain in it, and who learns from whom: the facts behind `fedattune explain`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import RunError, did_you_mean, suggest_name
from ..training.metrics import RunMetrics
from .clusters import Clusters, find_clusters
from .compare import BASELINE, compute_gap, group_by_algorithm, pair_runs
from .load import Runs
from .partners import MixtureShares, compute_shares, sum_rows
from .relations import FloatArray, LabelAgreement, MixingAnalysis, measure_agreement
from .verdict import reach_verdict

MAX_LISTED_CLIENTS = 60
"""Clients that a message lists."""


@dataclass(frozen=True)
class ClientGain:
    """What one client gains over training alone, in points of test accuracy at both methods' headline points.

    `local` and `method` are percentages, means over the seeds; `samples` is how many of its `n_test` test samples the
    gain is; `by_seed` is of the seeds that both were run with, `std` their population standard deviation.
    """

    points: float
    local: float
    method: float
    n_test: int
    samples: float
    by_seed: dict[int, float]
    std: float | None


@dataclass(frozen=True)
class ClientSummary:
    """One client in short: samples, accuracy in percent (mean over seeds), gain, its last weights over components."""

    client: str
    n_train: int
    n_test: int
    accuracy: float | None
    gain: ClientGain | None
    given: MixtureShares | None
    agreement: LabelAgreement | None


@dataclass(frozen=True)
class ComponentSummary:
    """One component over all clients: the mean share that they keep of their own, and how weights follow labels."""

    name: str
    own: float
    even: bool
    agreement: LabelAgreement | None


class RunExplanation:
    """A method of some runs and one run of it, of which all is told; `client` is one that must be looked at.

    Without a method, it is the verdict's if it mixes client by client, else the first that does, else the verdict's.

    Raises:
        RunError: there is no such method, seed or client.

    """

    def __init__(
        self, runs: Runs, algorithm: str | None = None, seed: int | None = None, client: str | None = None
    ) -> None:
        self.runs = runs
        self._always = [] if client is None else [_find_client(runs.results[0], client)]
        self.why: str | None = None
        self.run = self._one(algorithm, seed) if algorithm else self._chosen(seed)
        self.relations = MixingAnalysis(self.run, self._always)

    def _one(self, algorithm: str, seed: int | None) -> RunMetrics:
        found = self.runs.of(algorithm, seed)
        if not found:
            seeds = ", ".join(str(run.settings.seed) for run, _ in self.runs.of(algorithm, None))
            raise RunError(f"no run of {algorithm} with seed {seed} here; there are those with {seeds}")
        return found[0][0]

    def _chosen(self, seed: int | None) -> RunMetrics:
        names = list(dict.fromkeys(run.algorithm for run, _ in self.runs.of(None, seed)))
        first = reach_verdict(self.runs.results).method
        ordered = sorted(names, key=lambda name: (name == BASELINE, name != first))
        for name in ordered:
            run = self._one(name, seed)
            if MixingAnalysis(run, self._always).mixes:
                if first is not None and name != first:
                    self.why = (
                        f"The verdict is about {first}, which does not mix client by client; {name} does."
                    )
                return run
        return self._one(ordered[0], seed)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.run.algorithm

    @cached_property
    def groups(self) -> dict[str, list[RunMetrics]]:
        """The runs of every method."""
        return group_by_algorithm(self.runs.results)

    @cached_property
    def mixes(self) -> bool:
        """Whether clients were given different mixtures."""
        return self.relations.mixes

    @property
    def sends(self) -> str | None:
        """What the method sends in place of mixtures, in a sentence; None where it sends these."""
        if self.mixes:
            return None
        if self.method == BASELINE:
            return "local sends nothing: every client trains by itself and learns from nobody."
        if self.relations.rounds:
            return (
                f"{self.method} sends one model to all, made of those of the clients that took part in a round: nobody "
                "learns from anybody in particular."
            )
        if not self.run.bytes_up:
            return f"{self.method} shared nothing here: nobody learns from anybody."
        return (
            f"{self.method} has no mixing matrices: what it sends is no mixture of clients' models, so it cannot be "
            "said who learns from whom."
        )

    @property
    def no_gain(self) -> str | None:
        """Why gains cannot be said, and what to do; None if they can."""
        if BASELINE in self.groups:
            return None
        return (
            "What clients gain cannot be said, as these runs have no local, training alone: train it beside the "
            f"method by fedattune compare --algorithms local,{self.method} and the same options."
        )

    def gain(self, i: int) -> ClientGain | None:
        """What the client at place `i` gains; None without `local`, for `local`, and without test samples."""
        place = self.relations.places[i]
        n_test = self.run.clients[place].n_test
        if self.method == BASELINE or BASELINE not in self.groups or not n_test:
            return None
        mine, alone = (_accuracy_by_seed(runs, place) for runs in pair_runs(self.groups, self.method))
        method, local = float(np.mean([*mine.values()])), float(np.mean([*alone.values()]))
        points = float(compute_gap(np.array(method), np.array(local)))
        if not np.isfinite(points):
            return None
        both = [seed for seed in mine if seed in alone]
        by_seed = {seed: float(compute_gap(np.array(mine[seed]), np.array(alone[seed]))) for seed in both}
        std = float(np.std([*by_seed.values()])) if len(by_seed) > 1 else None
        return ClientGain(points, local, method, n_test, points / 100 * n_test, by_seed, std)

    def brief(self, i: int) -> ClientSummary:
        """The client at place `i` in short."""
        place = self.relations.places[i]
        one = self.run.clients[place]
        accuracy = float(np.mean([*_accuracy_by_seed(self.groups[self.method], place).values()]))
        known, agree = None, None
        if self.mixes and (since := self._since[i]) is not None:
            mean = self.relations.mean
            known = compute_shares(self.relations.names, i, since, mean[i], float(self._totals[i]))
            if self.relations.similarity is not None:
                agree = measure_agreement(mean, self.relations.similarity, [i], self.relations.offered)
        finite = accuracy if np.isfinite(accuracy) else None
        return ClientSummary(
            self.relations.names[i], one.n_train, one.n_test, finite, self.gain(i), known, agree
        )

    @cached_property
    def _since(self) -> Sequence[int | None]:
        return self.relations.since(self.relations.rounds[-1])

    @cached_property
    def _totals(self) -> FloatArray:
        return sum_rows(self.relations)

    @cached_property
    def clients(self) -> list[ClientSummary]:
        """All clients looked at, in short."""
        return [self.brief(i) for i in range(len(self.relations.names))]

    @cached_property
    def components(self) -> list[ComponentSummary]:
        """All components, over all clients; none of a method that does not mix."""
        if not self.mixes:
            return []
        agreements = self.relations.agreement()
        found = []
        for name, matrix in self.relations.last.items():
            known = np.flatnonzero(~np.isnan(matrix).any(1)).tolist()
            own = float(matrix[known, known].mean())
            even = all(compute_shares(self.relations.names, i, 0, matrix[i]).even for i in known)
            found.append(ComponentSummary(name, own, even, agreements.get(name)))
        return found

    @cached_property
    def clusters(self) -> Clusters | None:
        """Clients that learn from each other more than chance would have it, if there are any."""
        return find_clusters(self.relations) if self.mixes else None


def _accuracy_by_seed(runs: Sequence[RunMetrics], place: int) -> dict[int, float]:
    """Seed -> test accuracy of a client in percent at the headline point; NaN where it was never evaluated."""
    found = {run.settings.seed: getattr(run.clients[place], run.headline) for run in runs}
    return {seed: np.nan if value is None else 100 * value for seed, value in found.items()}


def _find_client(run: RunMetrics, client: str) -> int:
    """The place of a client among the evaluated ones."""
    known = [str(one["id"]) for one in run.facts["clients"]]
    if client in known:
        return known.index(client)
    hint = did_you_mean(client, known) if len(known) <= MAX_LISTED_CLIENTS else suggest_name(client, known)
    some = f", of whose {run.n_clients:,} clients {len(known):,} were evaluated"
    raise RunError(
        f"no client {client!r} in this run{some if len(known) < run.n_clients else ''}"
        + (f"; {hint}" if hint else "; fedattune explain without --client lists them")
    )
