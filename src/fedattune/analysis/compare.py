"""Methods side by side: accuracy, gain over training alone and cost, over clients and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..training.metrics import Point, RunMetrics

BASELINE = "local"
"""The method that every other one is compared with: each client trains alone."""

AnyRun = TypeVar("AnyRun", bound="RunMetrics")
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def describe_failure(algorithm: str, seed: int, error: str) -> str:
    """Say in one sentence which run failed, and why."""
    return f"{algorithm} failed with seed {seed}: {error}"


class MeanStd(NamedTuple):
    """Mean and population standard deviation over the seeds."""

    mean: float
    std: float


@dataclass(frozen=True)
class MethodRow:
    """One method in the table; accuracies are fractions, numbers are over the seeds.

    Attributes:
        algorithm: the method's name.
        point: the headline point, received or trained.
        mean, pooled, std, worst10: test accuracy over clients, over all samples, its deviation over clients, and its
            mean over the worst tenth of the clients, after the last round.
        better_than_local: share of the clients that gain over training alone.
        best_validation: mean test accuracy at the round with the best validation accuracy.
        bmta, bmta_pooled: best mean test accuracy of any round.
        mean_last_10pct: mean test accuracy in the last tenth of the rounds.
        rounds_to: for each seed, the first round with the accuracy asked for; None if it was not reached.
        global_accuracy: accuracy of the global model on all test samples.
        arrived, newcomers: mean accuracy of clients that joined after training, at first and after own rounds.
        effects: part -> distance of the mechanism's values from the nearest reference; see `Effect`.
        bytes_up, bytes_down, seconds, local_steps: cost, the steps per client.
        n_seeds: runs.

    """

    algorithm: str
    point: str
    mean: MeanStd
    pooled: MeanStd
    std: MeanStd
    worst10: MeanStd
    better_than_local: float | None
    best_validation: MeanStd | None
    bmta: MeanStd | None
    bmta_pooled: MeanStd | None
    mean_last_10pct: MeanStd | None
    rounds_to: list[int | None] | None
    global_accuracy: MeanStd | None
    arrived: MeanStd | None
    newcomers: MeanStd | None
    effects: dict[str, float]
    bytes_up: float
    bytes_down: float
    seconds: float
    local_steps: float
    n_seeds: int


def group_by_algorithm(results: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """Group runs by method, one per seed, in the order given."""
    groups: dict[str, list[AnyRun]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def compute_client_accuracy(runs: Sequence["RunMetrics"]) -> FloatArray:
    """Compute test accuracy per client (N,) at the headline point, averaged over the seeds."""
    per_run = [[getattr(client, run.headline) for client in run.clients] for run in runs]
    mean: FloatArray = np.array(per_run, dtype=np.float64).mean(axis=0)
    return mean


def pair_runs(groups: Mapping[str, list[AnyRun]], algorithm: str) -> tuple[list[AnyRun], list[AnyRun]]:
    """Return the runs of a method and of `local` with the same seeds, or all runs if they share no seed."""
    mine, alone = groups[algorithm], groups[BASELINE]
    common = {run.settings.seed for run in mine} & {run.settings.seed for run in alone}
    if not common:
        return mine, alone
    first, second = ([run for run in runs if run.settings.seed in common] for runs in (mine, alone))
    return first, second


def compute_gap(mine: FloatArray, alone: FloatArray) -> FloatArray:
    """Subtract accuracies; equal accuracies have no gap by the rounding of means."""
    return np.round(mine - alone, 12) + 0.0


def compute_gains(groups: Mapping[str, list[AnyRun]], algorithm: str) -> FloatArray | None:
    """Compute each client's gain over training alone (N,), a fraction, over the seeds; None without `local`."""
    if BASELINE not in groups or algorithm not in groups:
        return None
    mine, alone = pair_runs(groups, algorithm)
    return compute_gap(compute_client_accuracy(mine), compute_client_accuracy(alone))


def compute_mean_std(values: Sequence[float]) -> MeanStd:
    """Compute mean and population standard deviation of some numbers."""
    return MeanStd(float(np.mean(values)), float(np.std(values)))


def build_rows(results: Sequence["RunMetrics"], rounds_to: float | None = None) -> list[MethodRow]:
    """Build one row per method, in the order given.

    Args:
        results: runs on the same clients.
        rounds_to: a mean test accuracy to reach, a fraction.

    """
    groups = group_by_algorithm(results)
    return [_build_row(name, groups, rounds_to) for name in groups]


def _build_row(name: str, groups: Mapping[str, list["RunMetrics"]], rounds_to: float | None) -> MethodRow:
    runs = groups[name]
    numbers = [_pick_numbers(run) for run in runs]
    spreads: dict[str, Any] = {}
    for key in numbers[0]:
        values = [value for one in numbers if (value := one[key]) is not None]
        spreads[key] = compute_mean_std(values) if values else None
    gains = None if name == BASELINE else compute_gains(groups, name)
    return MethodRow(
        algorithm=name,
        point=runs[0].headline,
        better_than_local=None if gains is None else float(np.mean(gains > 0)),
        rounds_to=None if rounds_to is None else [run.rounds_to(rounds_to) for run in runs],
        effects=_average_effects(runs),
        bytes_up=float(np.mean([run.bytes_up for run in runs])),
        bytes_down=float(np.mean([run.bytes_down for run in runs])),
        seconds=float(np.mean([run.seconds for run in runs])),
        local_steps=float(np.mean([run.local_steps for run in runs])),
        n_seeds=len(runs),
        **spreads,
    )


def _average_effects(runs: Sequence["RunMetrics"]) -> dict[str, float]:
    """Average the smallest effect of each part over the runs: a run is another method if it is near any reference."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for part in dict.fromkeys(effect.mechanism.part for effect in run.effects):
            nearest = min(effect.value for effect in run.effects if effect.mechanism.part == part)
            values.setdefault(part, []).append(nearest)
    return {part: float(np.mean(each)) for part, each in values.items()}


def _pick_numbers(run: "RunMetrics") -> dict[str, float | None]:
    """Pick the accuracies of one run that a row shows over the seeds."""

    def average_newcomers(point: "Point") -> float | None:
        accuracies = [getattr(newcomer, point) for newcomer in run.newcomers]
        return float(np.mean(accuracies)) if accuracies else None

    final, best = run.metrics, run.bmta
    return {
        "mean": final["acc_uniform"],
        "pooled": final["acc_pooled"],
        "std": final["acc_std"],
        "worst10": final["acc_worst10"],
        "best_validation": run.best_validation["acc_uniform"] if run.best_validation else None,
        "bmta": best["uniform"]["accuracy"] if best else None,
        "bmta_pooled": best["pooled"]["accuracy"] if best else None,
        "mean_last_10pct": run.mean_last_10pct["acc_uniform"] if run.mean_last_10pct else None,
        "global_accuracy": run.global_accuracy,
        "arrived": average_newcomers("received"),
        "newcomers": average_newcomers("trained"),
    }


def rows_to_json(table: Sequence[MethodRow]) -> list[dict[str, Any]]:
    """Return the rows as JSON values."""
    return [
        {key: value._asdict() if isinstance(value, MeanStd) else value for key, value in vars(row).items()}
        for row in table
    ]
