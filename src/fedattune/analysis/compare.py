"""Methods side by side: their metric, gain over training alone and cost, over clients, seeds and splits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.io import read_json, write_json
from ..core.metrics import METRICS, MetricName
from ..runs.metrics import MERGED_NAME, Part, RunMetrics
from ..runs.predictions import RowPredictions, load_predictions, save_predictions
from .folder import list_parts, verify_experiment

BASELINE = "local"
"""The method that every other one is compared with: each client trains alone."""
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


BASELINE_FOLDER = "baselines"
"""Folder of the baselines in the folder of an experiment: baselines/NAME/split-0."""
Kind = Literal["alone", "pooled"]


@dataclass(frozen=True, eq=False)
class Baseline:
    """One baseline on one split, with the digest of the split that runs on it have, too, and predictions by part.

    A baseline of kind `alone` uses the rows of one client at a time; `pooled` uses everybody's rows, as no client can.
    It has no seed, and goes with runs of all seeds.
    """

    name: str
    kind: Kind
    split: int
    split_digest: str
    seconds: float
    predictions: Mapping[str, RowPredictions]
    notes: tuple[str, ...] = ()
    epsilon: float | None = None

    @property
    def algorithm(self) -> str:
        return self.name

    @property
    def seed(self) -> None:
        return None

    def measure_clients(self, metric: MetricName, part: Part = "test") -> FloatArray:
        if part not in self.predictions:
            return np.full(next(iter(self.predictions.values())).n_clients, np.nan)
        return self.predictions[part].measure_clients(metric)

    def measure_for_choice(self, metric: MetricName) -> FloatArray:
        return self.measure_clients(metric, "validation")  # they chose nothing about a baseline

    def save(self, experiment: Path) -> None:
        """Write the baseline into the folder of an experiment; the last file says that it is whole."""
        folder = experiment / BASELINE_FOLDER / self.name.replace(" ", "-") / f"split-{self.split}"
        folder.mkdir(parents=True, exist_ok=True)
        save_predictions(folder / "predictions.safetensors", self.predictions)
        keys = ("name", "kind", "split", "split_digest", "seconds", "notes", "epsilon")
        facts = {key: getattr(self, key) for key in keys}
        write_json(folder / "baseline.json", facts)


def read_baselines(experiments: Sequence[Path]) -> list[Baseline]:
    """Read the baselines in folders of experiments, in the order in which they were trained."""
    files = []
    for path in experiments:
        parts = [file for file in list_parts(path) if file.relative_to(path).parts[0] == BASELINE_FOLDER]
        verify_experiment(path, *parts)
        files += [file for file in parts if file.name == "baseline.json"]
    found: dict[tuple[str, int], Baseline] = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        facts: dict[str, Any] = read_json(file)
        facts |= {"notes": tuple(facts["notes"])}
        one = Baseline(**facts, predictions=load_predictions(file.with_name("predictions.safetensors")))
        found[one.name, one.split] = one
    return list(found.values())


Contestant = RunMetrics | Baseline
"""A method or a baseline, with the values of each client of one split."""
AnyRun = TypeVar("AnyRun", bound=Contestant)


def describe_failure(algorithm: str, seed: int, error: str) -> str:
    """Say in one sentence which run failed, and why."""
    return f"{algorithm} failed with seed {seed}: {error}"


class MeanStd(NamedTuple):
    """Mean and population standard deviation over the seeds and splits."""

    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method, or one baseline, in the table; numbers are over the seeds and splits.

    Attributes:
        kind: `together` for methods that share, `alone`, or `pooled` for everybody's rows in one place.
        point: the evaluation point, received or trained; a dash for a baseline.
        metric: name of the metric of `mean`, `pooled`, `std`, `worst10` and `worst`; of a metric in percent these are
            fractions.
        mean, pooled, std, worst10, worst: the metric on test data: mean over clients, over all rows, its deviation over
            clients, its mean over the worst tenth of the clients, and the worst client's, for the judged models.
            Clients with few test rows count less, except for the worst: see `weigh_tests`.
        metrics: metric -> its mean over clients, for all metrics of the target.
        recall: class -> share of its test rows that are classified rightly; empty where outputs are not at hand.
        better_than_local: share of the clients that gain over training alone.
        reference: the best thing alone by validation: `local` or a baseline.
        gain, interval: mean gain over the reference and its 95% interval, in points or in the unit of the metric; None
            for the reference itself, and the interval for too few clients.
        last: mean test accuracy after the last round; here and below, RMSE if the target is a number.
        best_validation: mean test accuracy at the round with the best validation accuracy.
        bmta, bmta_pooled: best mean test accuracy of any round; None if the target is a number.
        mean_last_10pct: mean test accuracy in the last tenth of the rounds.
        rounds_to: for each seed, the first round with the accuracy asked for; None if it was not reached.
        global_accuracy: accuracy of the global model on all test samples.
        arrived, newcomers: mean accuracy of clients that joined after training, at first and after own rounds.
        epsilon: largest epsilon of a run with differential privacy, of clients or of rows; None without it.
        effects: part -> distance of the mechanism's values from the nearest reference; see `Effect`.
        bytes_up, bytes_down, seconds, local_steps: cost, the steps per client.
        n_seeds: number of runs.
    """

    algorithm: str
    kind: str
    point: str
    metric: MetricName
    mean: MeanStd | None
    pooled: MeanStd | None
    std: MeanStd | None
    worst10: MeanStd | None
    worst: MeanStd | None
    metrics: dict[str, float]
    recall: dict[str, float]
    better_than_local: float | None
    reference: str = BASELINE
    gain: float | None = None
    interval: tuple[float, float] | None = None
    last: MeanStd | None = None
    best_validation: MeanStd | None = None
    bmta: MeanStd | None = None
    bmta_pooled: MeanStd | None = None
    mean_last_10pct: MeanStd | None = None
    rounds_to: list[int | None] | None = None
    global_accuracy: MeanStd | None = None
    arrived: MeanStd | None = None
    newcomers: MeanStd | None = None
    epsilon: float | None = None
    effects: dict[str, float] = field(default_factory=dict)
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float
    local_steps: float = 0.0
    n_seeds: int


def group_by_algorithm(results: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """Group runs by method, one per seed and split, in the order given."""
    groups: dict[str, list[AnyRun]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def average_clients(runs: Sequence[Contestant], metric: MetricName = "accuracy", part: Part = "test") -> FloatArray:
    """Average a metric of each client (N,) over runs; NaN for a client for whom no run defines it."""
    return average_known(np.array([run.measure_clients(metric, part) for run in runs], dtype=np.float64))


def average_known(values: FloatArray) -> FloatArray:
    """Average values (runs, N) over the runs in which each is known (N,)."""
    known = np.isfinite(values)
    total: FloatArray = np.where(known, values, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return total / np.where(known.any(axis=0), known.sum(axis=0), np.nan)


FULL_TEST_ROWS = 10
"""Test rows, over all splits, from which a client counts fully in means over clients."""


def weigh_tests(results: Sequence[Contestant]) -> FloatArray:
    """Weigh the clients in means over clients (N,): 1, and less for those with under FULL_TEST_ROWS test rows.

    A test row counts in each split that tests it.
    """
    by_split = {
        one.split: one.predictions["test"].sizes
        if isinstance(one, Baseline)
        else np.array([client.get("n_test", 0) for client in one.facts["clients"]])
        for one in results
    }
    weights: FloatArray = np.minimum(np.sum([*by_split.values()], axis=0), FULL_TEST_ROWS) / FULL_TEST_ROWS
    return weights if weights.any() else np.ones_like(weights)  # nobody told how many rows there are


def average_weighted(values: FloatArray, weights: FloatArray) -> float:
    """Average known values (N,) with weights (N,); NaN if none is known."""
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")


def align_runs(mine: Sequence[AnyRun], others: Sequence[Contestant]) -> tuple[Sequence[AnyRun], Sequence[Contestant]]:
    """Return the runs of `pair_runs` as two sequences; all runs if they have no seed and split in common."""
    pairs = pair_runs(mine, others)
    return ([one for one, _ in pairs], [other for _, other in pairs]) if pairs else (mine, others)


def pair_runs(mine: Sequence[AnyRun], others: Sequence[Contestant]) -> list[tuple[AnyRun, Contestant]]:
    """Pair runs with others of the same split and seed; a baseline, which has no seed, with all of its split."""
    by_key: dict[tuple[int, int | None], list[Contestant]] = {}
    for one in others:
        for seed in {one.seed, None}:
            by_key.setdefault((one.split, seed), []).append(one)
    pairs = [(run, by_key.get((run.split, run.seed)) or by_key.get((run.split, None), [])) for run in mine]
    return [(run, other) for run, same in pairs for other in same if run.seed is None or other.seed in (run.seed, None)]


def compute_gap(mine: FloatArray, alone: FloatArray) -> FloatArray:
    """Subtract values; equal values have no gap by the rounding of means."""
    return np.round(mine - alone, 12) + 0.0


def compute_gains(
    mine: Sequence[Contestant], others: Sequence[Contestant], metric: MetricName = "accuracy"
) -> FloatArray:
    """Compute how much better each client is with some runs than with others, over seeds and splits (N,).

    Larger is better for every metric. Runs that have no seed and split in common are compared in their means.
    """
    first, second = align_runs(mine, others)
    return METRICS[metric].sign * compute_gap(average_clients(first, metric), average_clients(second, metric))


def compute_gains_over_local(
    groups: Mapping[str, Sequence[Contestant]], algorithm: str, metric: MetricName = "accuracy"
) -> FloatArray | None:
    """Compute each client's gain over training alone (N,); None without `local`."""
    if BASELINE not in groups or algorithm not in groups:
        return None
    return compute_gains(groups[algorithm], groups[BASELINE], metric)


def compute_mean_std(values: Sequence[float]) -> MeanStd:
    """Compute mean and population standard deviation of some numbers."""
    with np.errstate(invalid="ignore", over="ignore"):  # the spread of infinite errors is not a number
        return MeanStd(float(np.mean(values)), float(np.std(values)))


def is_merged(run: RunMetrics) -> bool:
    """Return whether one client stands for all, because the server learned sums only."""
    return [client["id"] for client in run.facts["clients"]] == [MERGED_NAME]


def get_default_metric(results: Sequence[RunMetrics]) -> MetricName:
    """Return RMSE for runs whose target is a number, else accuracy: of classes, labels or positions."""
    return results[0].curve_metric.name if results else "accuracy"
