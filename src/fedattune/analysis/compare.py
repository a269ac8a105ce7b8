"""Results side by side, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..training.metrics import Point, RunMetrics

BASELINE = "local"  # the method that everything is compared with: each client trains by itself


AnyRun = TypeVar("AnyRun", bound="RunMetrics")


FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class MeanStd(NamedTuple):
    """Mean and population standard deviation over the seeds."""

    mean: float
    std: float


@dataclass(frozen=True)
class MethodRow:
    """One line of the table: a method, its numbers averaged over the seeds; accuracies are fractions."""

    algorithm: str
    point: str  # received or trained: when the method's model is meant to be used
    mean: MeanStd
    pooled: MeanStd
    std: MeanStd
    worst10: MeanStd
    better_than_local: float | None
    best_validation: MeanStd | None
    bmta: MeanStd | None
    bmta_pooled: MeanStd | None
    mean_last_10pct: MeanStd | None
    rounds_to: list[int | None] | None  # per seed, of the accuracy asked for; None: not reached
    generalised: MeanStd | None
    arrived: MeanStd | None  # clients that joined after training: with what they were sent first
    newcomers: MeanStd | None  # and after rounds of their own
    bytes_up: float
    bytes_down: float
    seconds: float
    local_steps: float
    n_seeds: int


def group_by_algorithm(results: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """The results of each method, one per seed, in the order given."""
    groups: dict[str, list[AnyRun]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def compute_client_accuracy(runs: Sequence["RunMetrics"]) -> FloatArray:
    """Test accuracy per client (N,) at the headline point, averaged over the seeds."""
    per_run = [[getattr(client, run.headline) for client in run.clients] for run in runs]
    mean: FloatArray = np.array(per_run, dtype=np.float64).mean(axis=0)
    return mean


def pair_runs(groups: Mapping[str, list[AnyRun]], algorithm: str) -> tuple[list[AnyRun], list[AnyRun]]:
    """The runs of a method and those of `local` with the same seeds; all of both where they share no seed."""
    mine, alone = groups[algorithm], groups[BASELINE]
    both = {run.settings.seed for run in mine} & {run.settings.seed for run in alone}
    if not both:
        return mine, alone
    first, second = ([run for run in runs if run.settings.seed in both] for runs in (mine, alone))
    return first, second


def compute_gap(mine: FloatArray, alone: FloatArray) -> FloatArray:
    """How much one is above the other; who was right as often neither gains nor loses by the rounding of means."""
    return np.round(mine - alone, 12) + 0.0


def compute_gains(groups: Mapping[str, list[AnyRun]], algorithm: str) -> FloatArray | None:
    """Gain of every client over training alone (N,), in fractions, averaged over the seeds; None without `local`."""
    if BASELINE not in groups or algorithm not in groups:
        return None
    mine, alone = pair_runs(groups, algorithm)
    return compute_gap(compute_client_accuracy(mine), compute_client_accuracy(alone))


def compute_mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and population standard deviation of some numbers."""
    return MeanStd(float(np.mean(values)), float(np.std(values)))


def _mean_std_of_known(values: Sequence[float | None]) -> MeanStd | None:
    """The spread of the seeds that have the number; None if none has."""
    known = [value for value in values if value is not None]
    return compute_mean_std(known) if known else None


def _best_accuracy(run: "RunMetrics", mean: str) -> float | None:
    return run.bmta[mean]["accuracy"] if run.bmta else None


def _newcomer_accuracy(run: "RunMetrics", point: "Point") -> float | None:
    """Mean over the newcomers: as they arrived, or after rounds of their own."""
    found = [getattr(newcomer, point) for newcomer in run.newcomers]
    return float(np.mean(found)) if found else None


def build_rows(results: Sequence["RunMetrics"], rounds_to: float | None = None) -> list[MethodRow]:
    """One row per method, in the order given; `rounds_to`: a mean test accuracy, a fraction, to be reached."""
    groups = group_by_algorithm(results)
    table = []
    for name, runs in groups.items():
        final = [run.metrics for run in runs]
        best = [run.best_validation["acc_uniform"] if run.best_validation else None for run in runs]
        late = [run.mean_last_10pct["acc_uniform"] if run.mean_last_10pct else None for run in runs]
        gained = None if name == BASELINE else compute_gains(groups, name)
        table.append(
            MethodRow(
                algorithm=name,
                point=runs[0].headline,
                mean=compute_mean_std([one["acc_uniform"] for one in final]),
                pooled=compute_mean_std([one["acc_pooled"] for one in final]),
                std=compute_mean_std([one["acc_std"] for one in final]),
                worst10=compute_mean_std([one["acc_worst10"] for one in final]),
                better_than_local=None if gained is None else float(np.mean(gained > 0)),
                best_validation=_mean_std_of_known(best),
                bmta=_mean_std_of_known([_best_accuracy(run, "uniform") for run in runs]),
                bmta_pooled=_mean_std_of_known([_best_accuracy(run, "pooled") for run in runs]),
                mean_last_10pct=_mean_std_of_known(late),
                rounds_to=None if rounds_to is None else [run.rounds_to(rounds_to) for run in runs],
                generalised=_mean_std_of_known([run.generalised for run in runs]),
                arrived=_mean_std_of_known([_newcomer_accuracy(run, "received") for run in runs]),
                newcomers=_mean_std_of_known([_newcomer_accuracy(run, "trained") for run in runs]),
                bytes_up=float(np.mean([run.bytes_up for run in runs])),
                bytes_down=float(np.mean([run.bytes_down for run in runs])),
                seconds=float(np.mean([run.seconds for run in runs])),
                local_steps=float(np.mean([run.local_steps for run in runs])),
                n_seeds=len(runs),
            )
        )
    return table


def rows_to_json(table: Sequence[MethodRow]) -> list[dict[str, Any]]:
    """The rows as JSON-able dictionaries."""
    return [
        {key: value._asdict() if isinstance(value, MeanStd) else value for key, value in vars_.items()}
        for vars_ in ({name: getattr(row, name) for name in asdict(row)} for row in table)
    ]
