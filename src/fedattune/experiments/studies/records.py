"""The raw results of a study: what each run was, and what it reached in every evaluated round."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import RunError
from ...core.io import read_json, replace_atomically, write_text
from ...training.metrics import Point, RunMetrics
from .cells import CellRun

RUNS_FILE, HISTORY_FILE, MIXING_FILE = "runs.json", "history.parquet", "mixing.parquet"


ACCURACIES = ("acc_uniform", "acc_pooled", "acc_std", "acc_worst10")


Columns = dict[str, list[Any]]


class Records:
    """Raw results in a folder.

    runs.json: id -> settings, cost, versions and date of a run, or why it failed. history.parquet: a line for each run,
    evaluated round, part (test, validation) and point (received, trained), with accuracies as fractions.
    mixing.parquet: mixing matrices averaged over thirds of the rounds, where the study is about them.

    Raises:
        RunError: files that cannot be read, or that do not belong together.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, dict[str, Any]] = {}
        self._history: list[pa.Table] = []
        self._mixing: list[pa.Table] = []
        if (folder / RUNS_FILE).exists():
            self.runs = read_json(folder / RUNS_FILE)
            if not isinstance(self.runs, dict) or not all(map(_is_run, self.runs.values())):
                raise RunError(f"{folder / RUNS_FILE} is no list of runs; take another --out")
            for tables, name in ((self._history, HISTORY_FILE), (self._mixing, MIXING_FILE)):
                if (folder / name).exists():
                    tables.append(self._read(name))
            there = {run for table in self._history for run in pc.unique(table["run"]).to_pylist()}
            lost = [i for i, facts in self.runs.items() if "failed" not in facts and i not in there]
            if lost:
                raise RunError(
                    f"{folder / HISTORY_FILE} lacks {len(lost)} runs that {RUNS_FILE} has, such as {lost[0]}; "
                    "restore it, or "
                    "take another --out"
                )

    def _read(self, name: str) -> pa.Table:
        """A table; without lines of runs that are not in the list, for that is written last."""
        try:
            table = pq.read_table(self.folder / name)
            return table.filter(pc.is_in(table["run"], pa.array(list(self.runs), pa.string())))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise RunError(f"cannot read {self.folder / name}: {error}; take another --out") from error

    def __contains__(self, run: CellRun) -> bool:
        return run.id in self.runs

    def add(
        self, run: CellRun, result: RunMetrics, environment: dict[str, Any], labels: list[list[int]] | None
    ) -> None:
        """Take over the numbers of a finished run; with the clients' label counts, its mixing matrices as well."""
        self.runs[run.id] = {
            **_what(run),
            "partition": result.config["partition"],
            "split": result.config["split"],
            "headline": result.headline,
            "n_parameters": result.n_parameters,
            "n_clients": result.n_clients,
            "local_steps": result.local_steps,
            "bytes_up": result.bytes_up,
            "bytes_down": result.bytes_down,
            "seconds": round(result.seconds, 1),
            "notes": result.notes,
            "environment": environment,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        self._append(self._history, _history(run.id, result))
        if labels is not None:
            self.runs[run.id]["labels"] = labels
            self._append(self._mixing, _mixing(run.id, result))

    def fail(self, run: CellRun, error: str) -> None:
        """Note that a run came to no result."""
        self.runs[run.id] = {**_what(run), "failed": error, "date": f"{datetime.now(UTC):%Y-%m-%d}"}

    def adopt(self, others: Iterable[Path], wanted: Iterable[CellRun], *, mixing: bool) -> bool:
        """Take over runs that other studies have had already; whether there were any."""
        missing = {run.id for run in wanted} - self.runs.keys()
        before = len(missing)
        for folder in others:
            if not missing or not (folder / RUNS_FILE).exists():
                continue
            try:
                known = Records(folder)
            except RunError:  # which is for that study to say
                continue
            for id_ in sorted(missing & known.runs.keys()):
                if mixing and not known.mixing(id_):
                    continue
                self.runs[id_] = known.runs[id_]
                missing.discard(id_)
                for mine, theirs in ((self._history, known._history), (self._mixing, known._mixing)):
                    for table in theirs:
                        mine.append(table.filter(pc.equal(table["run"], id_)))
        self._forget_cached()
        return len(missing) < before

    def _append(self, tables: list[pa.Table], content: Columns) -> None:
        tables.append(pa.table(content))
        self._forget_cached()

    def _forget_cached(self) -> None:
        for name in ("_by_run", "_mixing_by_run"):
            self.__dict__.pop(name, None)

    def save(self) -> None:
        """Write all files, each whole or not at all; the list of runs last, for it says what the others hold."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, tables in ((HISTORY_FILE, self._history), (MIXING_FILE, self._mixing)):
            if tables:
                with replace_atomically(self.folder / name) as new:
                    pq.write_table(_joined(tables), new, compression="zstd", use_dictionary=True)
        write_text(self.folder / RUNS_FILE, json.dumps(self.runs, indent=1, sort_keys=True) + "\n")

    @cached_property
    def _by_run(self) -> dict[str, dict[tuple[str, str], dict[str, np.ndarray[Any, Any]]]]:
        found: dict[str, dict[tuple[str, str], dict[str, np.ndarray[Any, Any]]]] = {}
        if not self._history:
            return found
        table = _joined(self._history)
        keys = list(zip(*(table[name].to_pylist() for name in ("run", "part", "point")), strict=True))
        numbers = {name: table[name].to_numpy() for name in ("round", *ACCURACIES)}
        order: dict[tuple[str, str, str], list[int]] = {}
        for i, key in enumerate(keys):
            order.setdefault(key, []).append(i)
        for (run, part, point), rows in order.items():
            found.setdefault(run, {})[part, point] = {k: v[rows] for k, v in numbers.items()}
        return found

    def curve(self, run: str, point: Point, part: str = "test") -> dict[str, np.ndarray[Any, Any]] | None:
        """Evaluated rounds of a run and its accuracies in them, each (E,); None where there are none."""
        return self._by_run.get(run, {}).get((part, point))

    @cached_property
    def _mixing_by_run(self) -> dict[str, dict[tuple[str, str], np.ndarray[Any, Any]]]:
        found: dict[str, dict[tuple[str, str], np.ndarray[Any, Any]]] = {}
        for table in self._mixing:
            for line in table.to_pylist():
                n = round(len(line["weights"]) ** 0.5)
                matrix = np.array(line["weights"]).reshape(n, n)
                found.setdefault(line["run"], {})[line["rounds"], line["component"]] = matrix
        return found

    def mixing(self, run: str) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
        """(rounds, component) -> matrix (N, N) of a run, averaged over those rounds; rows receive from columns."""
        return self._mixing_by_run.get(run, {})


def _is_run(facts: object) -> bool:
    experiment = facts.get("experiment") if isinstance(facts, dict) else None
    return isinstance(experiment, dict) and {"rounds", "mixed_precision", "seed"} <= experiment.keys()


def _what(run: CellRun) -> dict[str, Any]:
    return {
        "experiment": run.experiment.model_dump(mode="json", exclude={"data_dir"}),
        "options": run.options,
    }


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="permissive")


def _history(id_: str, result: RunMetrics) -> Columns:
    columns: Columns = {name: [] for name in ("run", "round", "part", "point", *ACCURACIES)}
    for entry in result.history:
        parts = {"test": entry, "validation": entry["validation"] or {}}
        for part, points in parts.items():
            for point in ("received", "trained"):
                if metrics := points.get(point):
                    for name, value in zip(columns, (id_, entry["round"], part, point), strict=False):
                        columns[name].append(value)
                    for name in ACCURACIES:
                        columns[name].append(metrics[name])
    types = {"round": np.int32} | dict.fromkeys(ACCURACIES, np.float32)
    return {k: np.array(v, dtype=types[k]) if k in types else v for k, v in columns.items()}  # type: ignore[misc]


def _mixing(id_: str, result: RunMetrics) -> Columns:
    """Matrices averaged over the first, the middle and the last third of the rounds, and over all.

    Of fewer than three rounds, each third is all of them.
    """
    columns: Columns = {name: [] for name in ("run", "rounds", "component", "weights")}
    log = result.mixing
    rounds = list(log)
    thirds = np.array_split(rounds, 3) if len(rounds) >= 3 else [np.array(rounds)] * 3
    parts = dict(zip(("first", "middle", "last"), thirds, strict=True)) | {"all": np.array(rounds)}
    for part, some in parts.items():
        sums: dict[str, list[np.ndarray[Any, Any]]] = {}
        for round_ in some:
            for component, matrix in log[int(round_)].items():
                sums.setdefault(component, []).append(matrix)
        for component, matrices in sums.items():
            stacked = np.stack(matrices)
            known = ~np.isnan(stacked)
            mean = np.where(known, stacked, 0).sum(0) / np.maximum(known.sum(0), 1)
            for name, value in zip(columns, (id_, part, component, mean.ravel().tolist()), strict=True):
                columns[name].append(value)
    return columns
