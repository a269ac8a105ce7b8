"""The table of a comparison: one row per method and baseline, and tidy tables of runs and clients."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..core.io import replace_nonfinite
from ..core.metrics import METRICS, MetricName
from ..runs.metrics import Point, RunMetrics
from .compare import (
    BASELINE,
    Baseline,
    Contestant,
    FloatArray,
    MeanStd,
    MethodRow,
    average_clients,
    average_weighted,
    compute_gains_over_local,
    compute_gap,
    compute_mean_std,
    get_default_metric,
    group_by_algorithm,
    is_merged,
    weigh_tests,
)
from .verdict import Comparison

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def build_rows(
    results: Sequence[RunMetrics],
    rounds_to: float | None = None,
    *,
    metric: MetricName | None = None,
    baselines: Sequence[Baseline] = (),
) -> list[MethodRow]:
    """Build one row per method and baseline, in the order given.

    Args:
        metric: the metric of the table; by default accuracy, or RMSE if the target is a number.
    """
    groups, others = group_by_algorithm(results), group_by_algorithm(baselines)
    metric = metric or get_default_metric(results)
    weights = weigh_tests(results or baselines)
    rows = [_build_row(name, groups, rounds_to, metric, weights) for name in groups]
    everybody = groups | others
    rows += [
        MethodRow(
            kind=group[0].kind,
            point="-",
            epsilon=max((one.epsilon for one in group if one.epsilon is not None), default=None),
            **_summarise(name, everybody, metric, weights),
        )
        for name, group in others.items()
    ]
    if BASELINE in groups:
        comparison = Comparison(results, baselines, metric)
        estimates = {row.algorithm: comparison.estimate(row.algorithm, comparison.reference) for row in rows}
        rows = [
            replace(row, reference=comparison.reference)
            if row.algorithm == comparison.reference or not np.isfinite((one := estimates[row.algorithm]).mean)
            else replace(row, reference=comparison.reference, gain=one.mean, interval=one.compute_interval())
            for row in rows
        ]
    if any(is_merged(run) for run in results):  # one client that stands for all has no spread
        return [replace(row, std=None, worst10=None, worst=None, better_than_local=None) for row in rows]
    return rows


def _summarise_metric(runs: Sequence[Contestant], metric: MetricName, weights: FloatArray) -> dict[str, MeanStd | None]:
    measure = METRICS[metric]
    summaries: dict[str, list[float]] = {"mean": [], "pooled": [], "std": [], "worst10": [], "worst": []}
    for run in runs:
        values = run.measure_clients(metric)
        is_counted = np.isfinite(values) & (weights > 0)
        if not is_counted.any():
            continue
        order = np.argsort(measure.sign * values[is_counted])
        values, shares = values[is_counted][order], weights[is_counted][order]
        mean = float(np.average(values, weights=shares))
        n_worst = max(1.0, round(0.1 * shares.sum()))  # a client with few rows is a part of one
        worst = np.clip(n_worst - (shares.cumsum() - shares), 0, shares)
        summaries["mean"].append(mean)
        summaries["std"].append(float(np.sqrt(np.average((values - mean) ** 2, weights=shares))))
        summaries["worst10"].append(float(np.average(values, weights=worst)))
        summaries["worst"].append(float(values[0]))
        if "test" in run.predictions:
            summaries["pooled"].append(run.predictions["test"].pooled[metric])
        elif metric == "accuracy" and (judged := getattr(run, "judged", {})).get("acc_pooled") is not None:
            summaries["pooled"].append(judged["acc_pooled"])
    found = {key: compute_mean_std(each) if each else None for key, each in summaries.items()}
    if found["mean"]:  # the mean of the clients' means, as in the verdict, also if some splits do not define it for all
        found["mean"] = found["mean"]._replace(mean=average_weighted(average_clients(runs, metric), weights))
    return found


def _build_row(
    name: str, groups: Mapping[str, list[RunMetrics]], rounds_to: float | None, metric: MetricName, weights: FloatArray
) -> MethodRow:
    runs = groups[name]
    numbers = [_pick_numbers(run) for run in runs]
    common = _summarise(name, groups, metric, weights)
    for key in numbers[0]:
        values = [value for one in numbers if (value := one[key]) is not None]
        common[key] = compute_mean_std(values) if values else None
    for cost in ("bytes_up", "bytes_down", "local_steps"):
        common[cost] = float(np.mean([getattr(run, cost) for run in runs]))
    return MethodRow(
        kind="alone" if name == BASELINE else "together",
        point=runs[0].evaluation_point,
        rounds_to=None if rounds_to is None else [run.rounds_to(rounds_to) for run in runs],
        epsilon=max((run.epsilon for run in runs if run.epsilon is not None), default=None),
        effects=_average_effects(runs),
        **common,
    )


def _summarise(
    name: str, groups: Mapping[str, Sequence[Contestant]], metric: MetricName, weights: FloatArray
) -> dict[str, Any]:
    """Return the columns that methods and baselines have in common."""
    runs = groups[name]
    classes = list_classes([run for group in groups.values() for run in group])
    gains = None if name == BASELINE else compute_gains_over_local(groups, name, metric)
    known = np.zeros(0) if gains is None else gains[np.isfinite(gains)]
    means = {}
    for key in METRICS:
        with suppress(KeyError):  # a metric of numbers for classes, or the reverse
            values = average_clients(runs, METRICS[key].name)
            if np.isfinite(mean := average_weighted(values, weights)):
                means[key] = mean
    return {
        "algorithm": name,
        "metric": metric,
        "metrics": means,
        "recall": _average_recalls(runs, classes),
        "better_than_local": float(np.mean(known > 0)) if len(known) else None,
        "seconds": float(np.mean([run.seconds for run in runs])),
        "n_seeds": len(runs),
        **_summarise_metric(runs, metric, weights),
    }


def list_classes(runs: Sequence[Contestant]) -> list[str]:
    """Return the names of the classes or labels, which baselines do not have; none if the target is a number."""
    return next((run.label_names for run in runs if isinstance(run, RunMetrics)), [])


def _average_recalls(runs: Sequence[Contestant], classes: Sequence[str]) -> dict[str, float]:
    """Average the recall of each class over the runs that have test rows of it."""
    each = [run.predictions["test"].recalls for run in runs if classes and "test" in run.predictions]
    known = [[float(one[i]) for one in each if np.isfinite(one[i])] for i in range(len(classes))]
    return {name: float(np.mean(values)) for name, values in zip(classes, known, strict=True) if values}


def _average_effects(runs: Sequence[RunMetrics]) -> dict[str, float]:
    """Average the smallest effect of each part over the runs: a run is another method if it is near any reference."""
    values: dict[str, list[float]] = {}
    for run in runs:
        nearest: dict[str, float] = {}
        for effect in run.effects:
            part, value = effect.mechanism.part, effect.value
            nearest[part] = min(nearest.get(part, value), value)
        for part, value in nearest.items():
            values.setdefault(part, []).append(value)
    return {part: float(np.mean(each)) for part, each in values.items()}


def _pick_numbers(run: RunMetrics) -> dict[str, float | None]:
    def average_newcomers(point: Point) -> float | None:
        accuracies = [getattr(newcomer, point) for newcomer in run.newcomers]
        return float(np.mean(accuracies)) if accuracies else None

    def read_mean(metrics: Mapping[str, float] | None) -> float | None:
        return run.read_curve(metrics) / run.curve_metric.scale if metrics else None

    return {
        "last": read_mean(run.final[run.evaluation_point]),
        "best_validation": read_mean(run.best_validation),
        "bmta": run.bmta["uniform"]["accuracy"] if run.bmta else None,
        "bmta_pooled": run.bmta["pooled"]["accuracy"] if run.bmta else None,
        "mean_last_10pct": read_mean(run.mean_last_10pct),
        "global_accuracy": run.global_accuracy,
        "arrived": average_newcomers("received"),
        "newcomers": average_newcomers("trained"),
    }


def rows_to_json(table: Sequence[MethodRow]) -> list[dict[str, Any]]:
    """Return the rows as JSON values; None for numbers that are not finite."""
    return [
        {
            key: replace_nonfinite(value._asdict() if isinstance(value, MeanStd) else value)
            for key, value in vars(row).items()
        }
        for row in table
    ]


SPREADS = (
    "mean", "pooled", "std", "worst10", "worst", "last", "best_validation", "bmta", "bmta_pooled", "mean_last_10pct",
    "global_accuracy", "arrived", "newcomers",
)  # fmt: skip
"""Columns that `MethodRow` has as mean and deviation; of a single run, the mean is its number."""
NUMBERS = ("gain", "better_than_local", "bytes_up", "bytes_down", "seconds", "local_steps")


def build_run_table(
    results: Sequence[RunMetrics],
    baselines: Sequence[Baseline] = (),
    *,
    metric: MetricName | None = None,
    rounds_to: float | None = None,
) -> "pa.Table":
    """Build a table with one row for each method, seed and split, and one for each baseline and split."""
    metric = metric or get_default_metric(results)
    runs = {(run.algorithm, run.split, run.seed): run for run in results}
    rows: dict[tuple[str, int, int | None], dict[str, Any]] = {}
    classes = list_classes(results)
    for split, seed in dict.fromkeys((run.split, run.seed) for run in results):
        here = [run for run in results if (run.split, run.seed) == (split, seed)]
        alone = [one for one in baselines if one.split == split]
        for line in build_rows(here, rounds_to, metric=metric, baselines=alone):
            run = runs.get((line.algorithm, split, seed))
            key = (line.algorithm, split, None if run is None else seed)
            rows.setdefault(key, _describe_run(line, run, split, rounds_to, classes))
    order = list(dict.fromkeys([*(run.algorithm for run in results), *(one.name for one in baselines)]))
    return _make_table([rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1], key[2] or 0))])


def _describe_run(
    line: MethodRow, run: RunMetrics | None, split: int, rounds_to: float | None, classes: Sequence[str]
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": line.algorithm, "kind": line.kind, "seed": None, "split": split}
    row |= dict.fromkeys(("model", "clients", "rounds")) | {"finished": True, "lr": None, "metric": line.metric}
    if run is not None:
        row |= {"seed": run.seed, "model": line.point, "clients": run.n_clients, "rounds": run.rounds}
        row |= {"finished": run.is_finished, "lr": run.settings.training.lr}
    for name in SPREADS:
        spread: MeanStd | None = getattr(line, name)
        row[name] = None if spread is None else spread.mean
    row |= {name: getattr(line, name) for name in NUMBERS}
    if rounds_to is not None:
        row["rounds_to"] = line.rounds_to[0] if line.rounds_to else None
    row |= {f"recall {name}": line.recall.get(name) for name in classes}
    return row | {name: line.metrics.get(name) for name in METRICS}


def build_client_table(
    results: Sequence[RunMetrics], baselines: Sequence[Baseline] = (), *, metric: MetricName | None = None
) -> "pa.Table":
    """Build a table with one row for each client of each run and baseline; arguments as for `build_run_table`.

    `gain` is how much better the client is than under `local` with the same seed and split, in the metric.
    """
    metric = metric or get_default_metric(results)
    local = {(run.split, run.seed): run.measure_clients(metric) for run in results if run.algorithm == BASELINE}
    rows = [row for run in results for row in _describe_clients(run, metric, local.get((run.split, run.seed)))]
    names = [client["id"] for client in results[0].facts["clients"]] if results else []
    for one in baselines:
        known = dict.fromkeys(rows[0]) | {"method": one.name, "split": one.split, "metric": metric}
        values = _measure_all(one)
        rows += [
            known | {"client": name} | {key: each[i] for key, each in values.items()} for i, name in enumerate(names)
        ]
    return _make_table(rows)


def _describe_clients(run: RunMetrics, metric: MetricName, local: NDArray[np.float64] | None) -> list[dict[str, Any]]:
    values = _measure_all(run)
    gains = None
    if local is not None and run.algorithm != BASELINE:
        gains = METRICS[metric].sign * compute_gap(run.measure_clients(metric), local)
    return [
        {
            "method": run.algorithm,
            "seed": run.seed,
            "split": run.split,
            "client": client.id,
            "n_train": client.n_train,
            "n_test": client.n_test,
            "metric": metric,
            "gain": None if gains is None else gains[i],
            **{name: values[name][i] if name in values else None for name in METRICS},
            "received": client.received,
            "trained": client.trained,
        }
        for i, client in enumerate(run.clients)
    ]


def _measure_all(one: Contestant) -> dict[str, NDArray[np.float64]]:
    values = {}
    for name, metric in METRICS.items():
        with suppress(KeyError):  # a metric of numbers for classes, or the reverse
            values[name] = one.measure_clients(metric.name)
    return values


def _make_table(rows: Sequence[Mapping[str, Any]]) -> "pa.Table":
    """Make a table, without the columns that no row has; NaN counts as missing."""
    import pyarrow as pa

    columns = {
        name: [None if isinstance(row[name], float) and np.isnan(row[name]) else row[name] for row in rows]
        for name in (rows[0] if rows else ())
    }
    return pa.table({name: values for name, values in columns.items() if any(one is not None for one in values)})


def to_pandas(table: "pa.Table") -> "pd.DataFrame":
    """Return a tidy table as a data frame."""
    try:
        import pandas as pd  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "to_pandas needs pandas, which is not installed: pip install 'fedattune[pandas]'; without it, "
            "fedattune table RUN -o runs.csv writes the same table"
        ) from error
    return table.to_pandas()
