"""The facts behind `fedattune explain`: the run that is explained, and what its clients gain."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import RunError, did_you_mean, suggest_name
from ..training.metrics import RunMetrics
from .agreement import LabelAgreement
from .compare import BASELINE, compute_gap, group_by_algorithm, pair_runs
from .load import Runs
from .mixing import MixingAnalysis
from .partners import MixtureShares
from .verdict import reach_verdict

MAX_KNOWN_CLIENTS = 60
"""Clients up to which the message on an unknown client lists all."""


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client over training alone, at both methods' headline points.

    Attributes:
        points: the gain in points of test accuracy.
        local: accuracy of training alone in percent, mean over the seeds.
        method: accuracy of the method in percent, mean over the seeds.
        n_test: test samples of the client.
        samples: the gain in test samples.
        by_seed: the gain with every common seed, in points.
        std: population standard deviation over the seeds; None with one seed.

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
    """One client in short.

    Attributes:
        client: its name.
        n_train: training samples.
        n_test: test samples.
        accuracy: in percent, mean over the seeds; None if the client was never evaluated.
        gain: over training alone, where it is known.
        shares: its last mixture, averaged over the components, if it has one.
        agreement: of that mixture with label similarity, where labels are known.

    """

    client: str
    n_train: int
    n_test: int
    accuracy: float | None
    gain: ClientGain | None
    shares: MixtureShares | None
    agreement: LabelAgreement | None


class RunExplanation:
    """One run of a method, its mixing, and the gains of its clients.

    Without a method, the verdict's is taken if it mixes client by client, else the first one that does, else the
    verdict's.

    Args:
        runs: the runs that are compared.
        algorithm: the method to explain.
        seed: the seed of the run; default: the first one.
        client: name of a client that must be looked at.

    Attributes:
        run: the run.
        mixing: its mixing matrices.
        choice_note: a sentence on why this method was chosen, if it is not the verdict's.

    Raises:
        RunError: there is no such method, seed or client.

    """

    def __init__(
        self, runs: Runs, algorithm: str | None = None, seed: int | None = None, client: str | None = None
    ) -> None:
        self.runs = runs
        always = [] if client is None else [_find_client(runs.results[0], client)]
        first = None if algorithm else reach_verdict(runs.results).method
        names = (
            [algorithm]
            if algorithm
            else [*dict.fromkeys(run.algorithm for run, _ in runs.select(None, seed))]
        )
        names.sort(key=lambda name: (name == BASELINE, name != first))
        analyses = [MixingAnalysis(runs.select(name, seed)[0][0], always) for name in names]
        self.mixing = next((one for one in analyses if one.has_mixtures), analyses[0])
        self.run = self.mixing.run
        self.choice_note: str | None = None
        if self.mixing is not analyses[0] and names[0] == first:
            self.choice_note = (
                f"The verdict is about {first}, which does not mix client by client; {self.method} does."
            )

    @property
    def method(self) -> str:
        """The method's name."""
        return self.run.algorithm

    @cached_property
    def groups(self) -> dict[str, list[RunMetrics]]:
        """The runs of every method."""
        return group_by_algorithm(self.runs.results)

    @property
    def sending_note(self) -> str | None:
        """A sentence on what the method sends instead of mixtures; None if it sends mixtures."""
        if self.mixing.has_mixtures:
            return None
        if self.method == BASELINE:
            return "local sends nothing: every client trains by itself and learns from nobody."
        if self.mixing.rounds:
            return (
                f"{self.method} sends one model to all, made of the models of the clients that took part in a round: "
                "nobody learns from anybody in particular."
            )
        if not self.run.bytes_up:
            return f"{self.method} shared nothing here: nobody learns from anybody."
        return (
            f"{self.method} has no mixing matrices: it does not send mixtures of clients' models, so nobody can "
            "tell who learns from whom."
        )

    @property
    def gain_note(self) -> str | None:
        """A sentence on why gains are not known, and what to do; None if they are."""
        if BASELINE in self.groups:
            return None
        return (
            "The gain of clients is not known: these runs have no local, training alone. Run fedattune compare "
            f"--algorithms local,{self.method} and the same options."
        )

    @cached_property
    def clients(self) -> list[ClientSummary]:
        """All clients looked at, in short."""
        return [self.summarize_client(i) for i in range(len(self.mixing.names))]

    def summarize_client(self, i: int) -> ClientSummary:
        """Summarise the client at position `i` of the clients looked at."""
        mixing, position = self.mixing, self.mixing.positions[i]
        client, shares = self.run.clients[position], mixing.shares[i]
        accuracy = float(np.mean([*_accuracy_by_seed(self.groups[self.method], position).values()]))
        return ClientSummary(
            mixing.names[i],
            client.n_train,
            client.n_test,
            accuracy if np.isfinite(accuracy) else None,
            self._compute_gain(position),
            shares,
            mixing.compare_with_labels(mixing.mean, i) if shares else None,
        )

    def _compute_gain(self, position: int) -> ClientGain | None:
        """Compute a client's gain; None without `local`, for `local`, and without test samples."""
        n_test = self.run.clients[position].n_test
        if self.method == BASELINE or BASELINE not in self.groups or not n_test:
            return None
        mine, alone = (_accuracy_by_seed(runs, position) for runs in pair_runs(self.groups, self.method))
        method, local = float(np.mean([*mine.values()])), float(np.mean([*alone.values()]))
        points = float(compute_gap(np.array(method), np.array(local)))
        if not np.isfinite(points):
            return None
        common = [seed for seed in mine if seed in alone]
        by_seed = {seed: float(compute_gap(np.array(mine[seed]), np.array(alone[seed]))) for seed in common}
        std = float(np.std([*by_seed.values()])) if len(by_seed) > 1 else None
        return ClientGain(points, local, method, n_test, points / 100 * n_test, by_seed, std)


def _accuracy_by_seed(runs: list[RunMetrics], position: int) -> dict[int, float]:
    """Return seed -> test accuracy of a client in percent at the headline point; NaN if it was never evaluated."""
    accuracies = {run.settings.seed: getattr(run.clients[position], run.headline) for run in runs}
    return {seed: np.nan if value is None else 100 * value for seed, value in accuracies.items()}


def _find_client(run: RunMetrics, client: str) -> int:
    """Find the position of a client among the evaluated ones."""
    names = [str(one["id"]) for one in run.facts["clients"]]
    if client in names:
        return names.index(client)
    hint = did_you_mean(client, names) if len(names) <= MAX_KNOWN_CLIENTS else suggest_name(client, names)
    some = f", of whose {run.n_clients:,} clients {len(names):,} were evaluated"
    raise RunError(
        f"no client {client!r} in this run{some if len(names) < run.n_clients else ''}"
        + (f"; {hint}" if hint else "; fedattune explain without --client lists them")
    )
