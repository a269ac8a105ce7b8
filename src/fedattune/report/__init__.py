"""A comparison as one HTML file that needs no network: verdict, table, who gains, who learns from whom."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..census import Census
from ..compare import ALONE, by_algorithm, client_accuracy, columns, legend, rows

if TYPE_CHECKING:
    from ..data import Federation
    from ..result import Result

MOST_CLIENTS = 60
"""Clients shown in the label picture and the mixing matrices; more would not be readable."""


def write_report(
    path: Path,
    federation: "Federation | Census",
    results: "Sequence[Result]",
    *,
    verdict: str,
    notes: Sequence[str],
    rounds_to: float | None = None,
) -> None:
    """Write the report of a comparison to `path`; `rounds_to`: as for the table."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedattune.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f}"
    table = rows(results, rounds_to)
    joined = _newcomers(results)
    text = environment.get_template("report.html").render(
        title=f"{federation.name}: {federation.n_clients} clients"
        + (f", {len(joined)} of them joining after training" if joined else ""),
        verdict=verdict,
        tables=[
            {
                "columns": list(group),
                "rows": [(row.algorithm, [c(row) for c in group.values()]) for row in table],
            }
            for group in columns(table, rounds_to)
        ],
        legend=legend(table, rounds_to),
        newcomers=joined,
        clients=_clients(results),
        methods=list(by_algorithm(results)),
        classes=federation.classes,
        labels=[] if isinstance(federation, Census) else _labels(federation),
        mixing=_mixing(results),
        trained=[client.id for client in results[0].clients],
        names=federation.names[:MOST_CLIENTS],
        hidden=max(0, federation.n_clients - MOST_CLIENTS),
        notes=notes,
        config=_config(results[0]),
        version=__version__,
    )
    path.write_text(text, encoding="utf-8")


def _clients(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Per client: samples, accuracy by method, and what each method gains over training alone."""
    groups = by_algorithm(results)
    accuracy = {name: client_accuracy(runs) for name, runs in groups.items()}
    alone = accuracy.get(ALONE)
    return [
        {
            "id": client.id,
            "n_train": client.n_train,
            "n_test": client.n_test,
            "methods": [
                {"accuracy": a[i], "gain": None if alone is None or name == ALONE else a[i] - alone[i]}
                for name, a in accuracy.items()
            ],
        }
        for i, client in enumerate(results[0].clients)
    ]


def _newcomers(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Per client that joined after training and per method: its accuracies, averaged over the seeds."""
    found: dict[str, dict[str, Any]] = {}
    for name, runs in by_algorithm(results).items():
        joined = [newcomer for run in runs for newcomer in run.newcomers]
        for id_ in dict.fromkeys(newcomer.id for newcomer in joined):
            mine = [newcomer for newcomer in joined if newcomer.id == id_]
            ways = ("received", "trained", "local")
            means = {way: float(np.mean([getattr(one, way) for one in mine])) for way in ways}
            sizes = {"id": id_, "n_train": mine[0].n_train, "n_test": mine[0].n_test, "methods": []}
            entry = found.setdefault(id_, sizes)
            entry["methods"].append({"name": name, **means})
    return list(found.values())


def _labels(federation: "Federation") -> list[list[tuple[int, float]]]:
    """Per client and class: samples, and their share of the client's."""
    counts = federation.label_counts()[:MOST_CLIENTS]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    return [list(zip(c.tolist(), s.tolist(), strict=True)) for c, s in zip(counts, shares, strict=True)]


def _mixing(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """For each component of each method that mixes client by client: the last known row of every client."""
    found = []
    for name, runs in by_algorithm(results).items():
        last: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        log, shown = runs[0].mixing, min(MOST_CLIENTS, runs[0].n_clients)
        one_for_all = True  # one global model: every row is the same, and there is nothing to see
        # A client's last row: in every round only the cohort's rows are known.
        for round_ in list(log)[-50:]:
            rows, columns, weights = log.among(round_)
            seen = np.array([i for i, row in enumerate(rows) if row < shown], dtype=np.int64)
            for component, matrix in weights.items():
                one_for_all &= bool(np.ptp(matrix, axis=0).max() < 1e-6)
                known = last.setdefault(component, np.full((shown, shown), np.nan, dtype=np.float32))
                full = np.zeros((len(seen), runs[0].n_clients), dtype=np.float32)
                full[:, columns] = matrix[seen]
                known[np.array(rows)[seen]] = full[:, :shown]
        found += [
            {"method": name, "component": component, "rows": matrix.tolist()}
            for component, matrix in (() if one_for_all else last.items())
        ]
    return found


def _config(result: "Result") -> dict[str, Any]:
    hidden = ("algorithm", "definition", "options", "split")
    return {key: value for key, value in result.config.items() if key not in hidden}
