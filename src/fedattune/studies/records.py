"""The raw results of a study: the settings and the cost of each run, and its accuracy in every evaluated round."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..core.errors import RunError
from ..core.io import read_json, replace_atomically, write_text
from ..runs.metrics import Point, RunMetrics
from .study import CellRun

RUNS_FILE, HISTORY_FILE, MIXING_FILE = "runs.json", "history.parquet", "mixing.parquet"
ACCURACIES = ("acc_uniform", "acc_pooled", "acc_std", "acc_worst10")
Array = np.ndarray[Any, Any]
Curve = dict[str, Array]
"""`round` and the accuracies (fractions), each with one entry per evaluated round."""


class Records:
    """The raw results in the folder of a study.

    Run folders hold every client's scores and models; a study of 700 runs would fill gigabytes. A study keeps three
    small files instead.

    - `runs.json`: run id -> settings, cost, versions and date, or the reason of a failure.
    - `history.parquet`: one line per run, evaluated round, part (test, validation) and point (received, trained).
    - `mixing.parquet`: mixing matrices averaged over thirds of the rounds, in studies about mixing.

    `curves` maps run id -> (part, point) -> curve, `matrices` run id -> (rounds, component) -> matrix (N, N), where
    rows receive from columns and `rounds` is first, middle, last (a third each) or all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, dict[str, Any]] = {}
        self.curves: dict[str, dict[tuple[str, str], Curve]] = {}
        self.matrices: dict[str, dict[tuple[str, str], Array]] = {}
        if not (folder / RUNS_FILE).exists():
            return
        self.runs = read_json(folder / RUNS_FILE)
        if not isinstance(self.runs, dict) or not all(map(_is_run, self.runs.values())):
            raise RunError(f"{folder / RUNS_FILE} is no list of runs; take another --out")
        self._read_curves(self._read_table(HISTORY_FILE))
        for line in self._read_table(MIXING_FILE).to_pylist():
            n = round(len(line["weights"]) ** 0.5)
            matrix = np.array(line["weights"]).reshape(n, n)
            self.matrices.setdefault(line["run"], {})[line["rounds"], line["component"]] = matrix
        lost = [i for i, facts in self.runs.items() if "failed" not in facts and i not in self.curves]
        if lost:
            raise RunError(
                f"{folder / HISTORY_FILE} lacks {len(lost)} runs that {RUNS_FILE} has, such as {lost[0]}; restore it, "
                "or take another --out"
            )

    def _read_table(self, name: str) -> pa.Table:
        """Read a table; skip lines of runs that are not in `runs.json`, which is written last."""
        if not (self.folder / name).exists():
            return pa.table({})
        try:
            table = pq.read_table(self.folder / name)
            return table.filter(pc.is_in(table["run"], pa.array(list(self.runs), pa.string())))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise RunError(f"cannot read {self.folder / name}: {error}; take another --out") from error

    def _read_curves(self, table: pa.Table) -> None:
        if not table.num_columns:
            return
        values = {name: table[name].to_numpy() for name in ("round", *ACCURACIES)}
        lines: dict[tuple[str, str, str], list[int]] = {}
        for i, key in enumerate(zip(*(table[k].to_pylist() for k in ("run", "part", "point")), strict=True)):
            lines.setdefault(key, []).append(i)
        for (run, part, point), mine in lines.items():
            self.curves.setdefault(run, {})[part, point] = {k: v[mine] for k, v in values.items()}

    def __contains__(self, run: CellRun) -> bool:
        return run.id in self.runs

    def curve(self, run: str, point: Point, part: str = "test") -> Curve | None:
        return self.curves.get(run, {}).get((part, point))

    def mixing(self, run: str) -> Mapping[tuple[str, str], Array]:
        return self.matrices.get(run, {})

    def add(
        self, run: CellRun, result: RunMetrics, environment: dict[str, Any], labels: list[list[int]] | None
    ) -> None:
        """Add a finished run; samples of each client and label, (N, K), keep the mixing matrices too."""
        names = ("n_parameters", "n_clients", "local_steps", "bytes_up", "bytes_down", "notes")
        self.runs[run.id] = {
            **_describe(run),
            **{name: result.config[name] for name in ("partition", "split")},
            "evaluation_point": result.evaluation_point,
            **{name: getattr(result, name) for name in names},
            "seconds": round(result.seconds, 1),
            "environment": environment,
        }
        self.curves[run.id] = _extract_curves(result)
        if labels is not None:
            self.runs[run.id]["labels"] = labels
            self.matrices[run.id] = _average_mixing(result)

    def add_failure(self, run: CellRun, error: str) -> None:
        self.runs[run.id] = {**_describe(run), "failed": error}

    def adopt(self, folders: Iterable[Path], runs: Iterable[CellRun], *, mixing: bool) -> bool:
        """Copy missing runs from other studies, with `mixing` only those with matrices; tell whether there was any."""
        missing = {run.id for run in runs} - self.runs.keys()
        before = len(self.runs)
        for folder in folders:
            if not missing or not (folder / RUNS_FILE).exists():
                continue
            try:
                other = Records(folder)
            except RunError:  # a command on that study reports it
                continue
            for run in sorted(missing & (other.matrices if mixing else other.runs).keys()):
                missing.discard(run)
                self.runs[run] = other.runs[run]
                self.curves[run] = other.curves.get(run, {})
                self.matrices[run] = other.matrices.get(run, {})
        return len(self.runs) > before

    def save(self) -> None:
        """Write all files, each whole or not at all; `runs.json` last, because it lists the content of the others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        curves = [
            {"run": [run] * len(curve["round"]), "part": [part] * len(curve["round"])}
            | {"point": [point] * len(curve["round"]), **curve}
            for run, run_curves in self.curves.items()
            for (part, point), curve in run_curves.items()
        ]
        matrices = [
            {"run": [run], "rounds": [rounds], "component": [component], "weights": [matrix.ravel().tolist()]}
            for run, run_matrices in self.matrices.items()
            for (rounds, component), matrix in run_matrices.items()
        ]
        for name, parts in ((HISTORY_FILE, curves), (MIXING_FILE, matrices)):
            if parts:
                table = pa.concat_tables(map(pa.table, parts), promote_options="permissive").combine_chunks()
                with replace_atomically(self.folder / name) as new:
                    pq.write_table(table, new, compression="zstd", use_dictionary=True)
        write_text(self.folder / RUNS_FILE, json.dumps(self.runs, indent=1, sort_keys=True) + "\n")


def _is_run(facts: object) -> bool:
    experiment = facts.get("experiment") if isinstance(facts, dict) else None
    return isinstance(experiment, dict) and {"rounds", "mixed_precision", "seed"} <= experiment.keys()


def _describe(run: CellRun) -> dict[str, Any]:
    return {
        "experiment": run.experiment.to_keywords(mode="json", exclude={"data_dir"}),
        "options": run.options,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _extract_curves(result: RunMetrics) -> dict[tuple[str, str], Curve]:
    lines: dict[tuple[str, str], list[list[float]]] = {}
    for entry in result.history:
        for part, points in (("test", entry), ("validation", entry["validation"] or {})):
            for point in ("received", "trained"):
                if metrics := points.get(point):
                    line = [entry["round"], *(metrics[name] for name in ACCURACIES)]
                    lines.setdefault((part, point), []).append(line)
    types = {"round": np.int32} | dict.fromkeys(ACCURACIES, np.float32)
    return {
        key: {name: np.array(v, dtype=types[name]) for name, v in zip(types, zip(*rows, strict=True), strict=True)}
        for key, rows in lines.items()
    }


def _average_mixing(result: RunMetrics) -> dict[tuple[str, str], Array]:
    log = result.mixing
    rounds = list(log)
    thirds = np.array_split(rounds, 3) if len(rounds) >= 3 else [rounds] * 3
    averages: dict[tuple[str, str], Array] = {}
    for name, some in zip(("first", "middle", "last", "all"), (*thirds, rounds), strict=True):
        for component in dict.fromkeys(key for r in some for key in log[int(r)]):
            stack = np.stack([log[int(r)][component] for r in some if component in log[int(r)]])
            is_known = ~np.isnan(stack)
            averages[name, component] = np.where(is_known, stack, 0).sum(0) / np.maximum(is_known.sum(0), 1)
    return averages
