"""Tidy tables of runs: numbers and no formatted text, one row per run, or one row per client of each run."""

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError, did_you_mean
from ...core.metrics import METRICS, MetricName
from ...core.text import guard_cell
from ..compare import BASELINE, Contestant, MeanStd, MethodRow, build_rows, compute_gap, get_default_metric

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from ...runs.metrics import RunMetrics
    from ..verdict.baseline import Baseline

SPREADS = (
    "mean", "pooled", "std", "worst10", "last", "best_validation", "bmta", "bmta_pooled", "mean_last_10pct",
    "global_accuracy", "arrived", "newcomers",
)  # fmt: skip
"""Columns that `MethodRow` has as mean and deviation; of a single run, the mean is its number."""

NUMBERS = ("better_than_local", "bytes_up", "bytes_down", "seconds", "local_steps")


def build_run_table(
    results: "Sequence[RunMetrics]",
    baselines: "Sequence[Baseline]" = (),
    *,
    metric: MetricName | None = None,
    rounds_to: float | None = None,
) -> "pa.Table":
    """Build a table with one row for each method, seed and split, and one for each baseline and split.

    Args:
        results: runs on the same clients.
        baselines: baselines on the same clients.
        metric: the metric of `mean`, `pooled`, `std` and `worst10`; by default accuracy, or RMSE.
        rounds_to: a mean test accuracy to reach, a fraction.
    """
    metric = metric or get_default_metric(results)
    runs = {(run.algorithm, run.split, run.seed): run for run in results}
    keys = list(dict.fromkeys((run.split, run.seed) for run in results))
    rows: dict[tuple[str, int, int | None], dict[str, Any]] = {}
    for split, seed in keys:
        here = [run for run in results if (run.split, run.seed) == (split, seed)]
        alone = [one for one in baselines if one.split == split]
        for line in build_rows(here, rounds_to, metric=metric, baselines=alone):
            run = runs.get((line.algorithm, split, seed))
            key = (line.algorithm, split, None if run is None else seed)
            rows.setdefault(key, _describe_run(line, run, split, rounds_to))
    names = [run.algorithm for run in results] + [one.name for one in baselines]
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    ordered = sorted(rows.items(), key=lambda item: (order[item[0][0]], item[0][1], item[0][2] or 0))
    return _make_table([row for _, row in ordered])


def _describe_run(
    line: MethodRow, run: "RunMetrics | None", split: int, rounds_to: float | None
) -> dict[str, Any]:
    """Return the numbers of one run; a baseline has no seed and no rounds."""
    row: dict[str, Any] = {
        "method": line.algorithm,
        "kind": line.kind,
        "seed": None if run is None else run.seed,
        "split": split,
        "model": None if run is None else line.point,
        "clients": None if run is None else run.n_clients,
        "rounds": None if run is None else run.rounds,
        "finished": True if run is None else run.is_finished,
        "lr": None if run is None else run.settings.lr,
        "metric": line.metric,
    }
    for name in SPREADS:
        spread: MeanStd | None = getattr(line, name)
        row[name] = None if spread is None else spread.mean
    row |= {name: getattr(line, name) for name in NUMBERS}
    if rounds_to is not None:
        row["rounds_to"] = line.rounds_to[0] if line.rounds_to else None
    return row | {name: line.metrics.get(name) for name in METRICS}


def build_client_table(
    results: "Sequence[RunMetrics]",
    baselines: "Sequence[Baseline]" = (),
    *,
    metric: MetricName | None = None,
) -> "pa.Table":
    """Build a table with one row for each client of each run and baseline; arguments as for `build_run_table`.

    `gain` is how much better the client is than under `local` with the same seed and split, in the metric.
    """
    metric = metric or get_default_metric(results)
    local = {
        (run.split, run.seed): run.measure_clients(metric) for run in results if run.algorithm == BASELINE
    }
    rows = [
        row for run in results for row in _describe_clients(run, metric, local.get((run.split, run.seed)))
    ]
    names = [client["id"] for client in results[0].facts["clients"]] if results else []
    for one in baselines:
        known = {"method": one.name, "seed": None, "split": one.split, "metric": metric}
        values = _measure_all(one)
        rows += [
            {
                **dict.fromkeys(rows[0]),
                **known,
                "client": name,
                **{key: each[i] for key, each in values.items()},
            }
            for i, name in enumerate(names)
        ]
    return _make_table(rows)


def _describe_clients(
    run: "RunMetrics", metric: MetricName, local: NDArray[np.float64] | None
) -> list[dict[str, Any]]:
    """Return the numbers of each client of a run; `local` holds the clients' metric when they train alone."""
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
    """Measure every metric of every client that the target has."""
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
    return pa.table(
        {name: values for name, values in columns.items() if any(one is not None for one in values)}
    )


def select_table_columns(table: "pa.Table", names: str | None) -> "pa.Table":
    """Select columns of a tidy table by their names, with commas between; None or `all` keeps all.

    Raises:
        ConfigError: there is no such column.
    """
    if names in (None, "all"):
        return table
    wanted = [name.strip() for name in str(names).split(",") if name.strip()]
    for name in wanted:
        if name not in table.column_names:
            raise ConfigError(
                f"--columns {name}: no such column; {did_you_mean(name, table.column_names)}, or all"
            )
    return table.select(wanted)


def write_csv(table: "pa.Table") -> str:
    """Write a tidy table as CSV; a missing number is an empty cell, and text is guarded against spreadsheets."""
    text = io.StringIO()  # not PyArrow's writer, which quotes every text
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows(zip(*(map(guard_cell, column.to_pylist()) for column in table.columns), strict=True))
    return text.getvalue()


def write_parquet(table: "pa.Table") -> bytes:
    """Write a tidy table as the content of a Parquet file."""
    from pyarrow import parquet

    content = io.BytesIO()
    parquet.write_table(table, content)
    return content.getvalue()


def to_pandas(table: "pa.Table") -> "pd.DataFrame":
    """Return a tidy table as a data frame.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "to_pandas needs pandas, which is not installed: pip install 'fedattune[pandas]'; without it, "
            "fedattune table RUN -o runs.csv writes the same table"
        ) from error
    return table.to_pandas()
