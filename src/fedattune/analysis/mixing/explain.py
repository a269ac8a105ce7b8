"""The facts behind `fedattune explain`: the run that is explained, and what its clients gain."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.errors import RunError, did_you_mean, suggest_name
from ...core.metrics import METRICS, Metric
from ...runs.metrics import RunMetrics
from ..compare import BASELINE, compute_gap, group_by_algorithm
from ..load import Runs
from . import LabelAgreement, MixingAnalysis, MixtureShares
from .decisions import Decisions, read_decisions

MAX_KNOWN_CLIENTS = 60
"""Clients up to which the message on an unknown client lists all."""


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client over training alone, with the judged models of both.

    Attributes:
        points: the gain in points, or in the unit of the metric; above 0 if the method is better.
        local, method: the metric of training alone and of the method, in percent if it is a share, mean over the seeds.
        samples: the gain in test samples; None unless the metric is accuracy.
        by_run, std: the gain with every common seed and split, and its population standard deviation, if several.
    """

    points: float
    local: float
    method: float
    n_test: int
    samples: float | None
    by_run: dict[str, float]
    std: float | None


@dataclass(frozen=True)
class ClientSummary:
    """One client in short.

    Attributes:
        value: the metric, in percent if it is a share, mean over the runs that define it; None if none does.
        shares: its last mixture, averaged over the components, if it has one.
        agreement: of that mixture with label similarity, where labels are known.
    """

    client: str
    n_train: int
    n_test: int
    value: float | None
    gain: ClientGain | None
    shares: MixtureShares | None
    agreement: LabelAgreement | None


class RunExplanation:
    """One run of a method, its mixing, and the gains of its clients.

    Without a method, the verdict's is taken. A client that is named is looked at even if there are too many.

    Attributes:
        choice_note: a sentence on another method that mixes client by client, if the verdict's does not.
    """

    def __init__(
        self, runs: Runs, algorithm: str | None = None, seed: int | None = None, client: str | None = None
    ) -> None:
        self.runs = runs
        always = [] if client is None else [_find_client(runs.results[0], client)]
        first = None if algorithm else runs.verdict.method
        names = [algorithm] if algorithm else [*dict.fromkeys(run.algorithm for run, _ in runs.select(None, seed))]
        names.sort(key=lambda name: (name == BASELINE, name != first))
        self.mixing = MixingAnalysis(runs.select(names[0], seed)[0][0], always)
        self.run = self.mixing.run
        self.choice_note: str | None = None
        others = [] if self.mixing.has_mixtures else names[1:]
        analyses = (MixingAnalysis(runs.select(name, seed)[0][0], always) for name in others)
        if other := next((one for one in analyses if one.has_mixtures), None):
            self.choice_note = (
                f"{other.run.algorithm} mixes client by client: --algorithm {other.run.algorithm} explains it."
            )

    @property
    def method(self) -> str:
        return self.run.algorithm

    @cached_property
    def groups(self) -> dict[str, list[RunMetrics]]:
        return group_by_algorithm(self.runs.results)

    @cached_property
    def decisions(self) -> Decisions | None:
        return read_decisions(self.run)

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
        return [self.summarize_client(i) for i in range(len(self.mixing.names))]

    def summarize_client(self, i: int) -> ClientSummary:
        mixing, position = self.mixing, self.mixing.positions[i]
        client, shares = self.run.clients[position], mixing.shares[i]
        # As in all tables, runs whose test rows do not define the metric are left out: splits have other rows.
        values = [one for one in self._measure_by_run(self.groups[self.method], position).values() if np.isfinite(one)]
        return ClientSummary(
            mixing.names[i],
            client.n_train,
            client.n_test,
            float(np.mean(values)) if values else None,
            self._compute_gain(position),
            shares,
            mixing.compare_with_labels(mixing.mean, i) if shares else None,
        )

    def _compute_gain(self, position: int) -> ClientGain | None:
        """Compute a client's gain; None without `local`, for `local`, and without test samples."""
        n_test = self.run.clients[position].n_test
        if self.method == BASELINE or BASELINE not in self.groups or not n_test:
            return None
        mine, alone = (self._measure_by_run(self.groups[name], position) for name in (self.method, BASELINE))
        mine, alone = ({k: v for k, v in values.items() if np.isfinite(v)} for values in (mine, alone))
        if not mine or not alone:
            return None

        def gain(one: float, other: float) -> float:
            return self.metric.sign * float(compute_gap(np.array(one), np.array(other)))

        common = [key for key in mine if key in alone]
        if common:
            mine, alone = ({key: values[key] for key in common} for values in (mine, alone))
        method, local = float(np.mean([*mine.values()])), float(np.mean([*alone.values()]))
        points = gain(method, local)
        by_run = {key: gain(mine[key], alone[key]) for key in common}
        std = float(np.std([*by_run.values()])) if len(by_run) > 1 else None
        samples = points / 100 * n_test if self.metric.name == "accuracy" else None
        return ClientGain(points, local, method, n_test, samples, by_run, std)

    @property
    def metric(self) -> Metric:
        return METRICS[self.runs.metric]

    def _measure_by_run(self, runs: list[RunMetrics], position: int) -> dict[str, float]:
        """Return seed (and split) -> the metric of a client's judged model; NaN where it is not defined."""
        values = {}
        for run in runs:
            value = float(run.measure_clients(self.metric.name)[position])
            values[f"{run.seed} split {run.split}" if run.split else f"{run.seed}"] = self.metric.scale * value
        return values


def _find_client(run: RunMetrics, client: str) -> int:
    names = [str(one["id"]) for one in run.facts["clients"]]
    if client in names:
        return names.index(client)
    hint = did_you_mean(client, names) if len(names) <= MAX_KNOWN_CLIENTS else suggest_name(client, names)
    some = f", of whose {run.n_clients:,} clients {len(names):,} were evaluated"
    raise RunError(
        f"no client {client!r} in this run{some if len(names) < run.n_clients else ''}"
        + (f"; {hint}" if hint else "; fedattune explain without --client lists them")
    )
