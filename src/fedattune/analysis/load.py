"""Runs from their folders, finished or not, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import RunError, did_you_mean
from ..core.io import natural_key, read_yaml
from ..core.metrics import METRICS, MetricName
from ..core.own_code import get_short_name
from ..runs.folder import CHECKSUM_FILE, CONFIG_FILE, RESUMABLE_SETTINGS, RunFolder, read_checksums
from ..runs.metrics import RunMetrics
from ..runs.predictions import RowPredictions, load_predictions
from ..runs.store import RunStore
from .compare import BASELINE, Baseline, MethodRow, describe_failure, get_default_metric, read_baselines
from .folder import (
    BUDGET_FILE,
    EXPERIMENT_FILE,
    MARKS,
    NOTES_FILE,
    RESULT_FILE,
    RUN_FOLDERS,
    make_run_name,
    read_experiment_file,
    verify_experiment,
)
from .rows import build_client_table, build_rows, build_run_table, to_pandas
from .verdict import Verdict, reach_verdict

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@dataclass(frozen=True)
class Runs:
    """Runs on the same clients.

    Attributes:
        results: the metrics of each run; runs of `local` come first.
        folders: the folder of each run.
        failed: a sentence for each failed run.
        waiting: folders of runs without a finished round.
        rounds_to: the mean test accuracy to reach, if the experiment names one.
        metric: the metric that the verdict is about.
        baselines: what clients can do alone with other tools, and what everybody's rows together give.
        notes: how the methods were tuned, or that they were not.
        is_tuned: whether validation data chose the methods' rates.
        failed_methods: the method of each failed run.
        is_growing: whether a comparison with a budget may still add splits.
    """

    results: list[RunMetrics]
    folders: list[Path]
    failed: list[str]
    waiting: list[Path]
    rounds_to: float | None = None
    metric: MetricName = "accuracy"
    baselines: Sequence[Baseline] = ()
    notes: Sequence[str] = ()
    is_tuned: bool = False
    failed_methods: Sequence[str] = ()
    is_growing: bool = False

    @property
    def is_finished(self) -> bool:
        """True if all runs are finished, and none will be added."""
        return not self.is_growing and not self.waiting and all(run.is_finished for run in self.results)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on these runs, as far as they have come."""
        return reach_verdict(
            self.results,
            baselines=self.baselines,
            metric=self.metric,
            failed=self.failed_methods,
            is_final=self.is_finished,
            is_tuned=self.is_tuned,
        )

    @cached_property
    def rows(self) -> list[MethodRow]:
        """The table of `compare`: one row per method and baseline."""
        return build_rows(self.results, self.rounds_to, metric=self.metric, baselines=self.baselines)

    def to_table(self, *, clients: bool = False) -> "pa.Table":
        """Return a tidy table of numbers: one row per method, seed and split, or per client of each."""
        if clients:
            return build_client_table(self.results, self.baselines, metric=self.metric)
        return build_run_table(self.results, self.baselines, metric=self.metric, rounds_to=self.rounds_to)

    def to_pandas(self, *, clients: bool = False) -> "pd.DataFrame":
        """Return a tidy data frame: one row per method, seed and split, or per client of each.

        Raises:
            ConfigError: pandas is not installed.
        """
        return to_pandas(self.to_table(clients=clients))

    @property
    def title(self) -> str:
        """The data and the number of clients."""
        if not self.results:
            return "no round finished yet"
        first = self.results[0]
        return f"{first.config['data']}: {first.n_clients:,} clients"

    def select(self, algorithm: str | None, seed: int | None) -> list[tuple[RunMetrics, Path]]:
        """Return the runs of one method and seed, None for all, with their folders."""
        names = list(dict.fromkeys(run.algorithm for run in self.results))
        if algorithm is not None and algorithm not in names:
            raise RunError(f"no run of {algorithm!r} here; {did_you_mean(algorithm, names)}")
        matches = [
            (run, folder)
            for run, folder in zip(self.results, self.folders, strict=True)
            if algorithm in (None, run.algorithm)
        ]
        seeds = ", ".join(map(str, sorted({run.settings.seed for run, _ in matches})))
        matches = [one for one in matches if seed in (None, one[0].settings.seed)]
        if not matches:
            method = f" of {algorithm}" if seed in [run.settings.seed for run in self.results] else ""
            raise RunError(f"no run{method} with seed {seed} here; give one of the seeds {seeds}")
        return matches


def read_run(path: Path, *, copy: bool = True) -> RunMetrics | None:
    """Read the metrics of one run, which may still train; None before its first round is stored.

    Args:
        copy: copy the store into memory; without it, one answer may be newer than the one before.
    """
    folder = RunFolder(path)
    finished = folder.is_finished
    if not finished:
        lost = [file for file in (folder.metrics, folder.facts) if not file.exists()]
        if lost and folder.checkpoints.has_any:
            raise RunError(
                f"{lost[0]} is missing, and the run has checkpoints; restore it from a copy, or resume the run, which "
                "writes it again or says that it cannot go on"
            )
        if lost:
            folder.verify(folder.config)  # a run that has begun has one
            return None
    config, facts = folder.read_config(), folder.read_facts(is_finished=finished)
    predictions: dict[str, RowPredictions] = {}
    if finished:
        folder.verify(folder.metrics, folder.predictions)
        predictions = load_predictions(folder.predictions)
    store = RunStore.load_copy(folder.metrics) if copy else RunStore.open_read_only(folder.metrics)
    if not store.rounds():
        store.close()
        return None
    return RunMetrics(config, facts, store, finished, predictions)


def read_runs(
    paths: Sequence[Path | str], *, running: bool = False, known: Mapping[Path, RunMetrics] | None = None
) -> Runs:
    """Read the runs in folders that `run` or `compare` wrote, or that are one of their runs.

    A run that is in two folders counts once. Runs of one method with other options are not further seeds of it; the
    folder's name distinguishes them.

    Args:
        paths: the folders.
        running: read also runs that still train, or that were stopped.
        known: resolved folder -> its finished run, which is in memory and not read again.

    Raises:
        RunError: a folder holds no run, none that is finished, or the runs are not of the same clients.
    """
    runs: dict[tuple[str, int, int], tuple[RunMetrics, Path]] = {}
    config_of: dict[str, dict[str, Any]] = {}  # name -> configuration of its runs
    name_of: dict[tuple[Path, str], str] = {}  # folder, method -> name
    identities, read_folders = list[tuple[object, ...]](), set[Path]()
    failed, waiting = dict[Path, tuple[Path, str, str]](), list[Path]()
    folders = [Path(path) for path in paths]
    for path in folders:
        failures, is_tuned = read_failures(path), (path / BUDGET_FILE).exists()
        failed |= {folder.resolve(): (path, *one) for folder, one in failures.items()}
        planned = [folder for folder, *_ in list_planned_runs(path)]
        waiting += [folder for folder in planned if not folder.exists() and folder not in failures]
        for folder in find_run_folders(path):
            if folder.resolve() in read_folders or folder in failures:
                continue
            read_folders.add(folder.resolve())
            run = (known or {}).get(folder.resolve()) or read_run(folder)
            if run is None or not (run.is_finished or running):
                waiting.append(folder)
                continue
            config, own, key = _strip_config(run, is_tuned=is_tuned), run.algorithm, (run.split, run.seed)
            if (own, key, run.rounds, config) in identities:
                continue
            identities.append((own, key, run.rounds, config))
            # Every folder is read once, so the last of these names is free.
            label = path if folder == path else path.resolve().name
            names = (own, *(f"{own} ({suffix})" for suffix in (label, path, folder, len(identities))))
            free = (name for name in names if (name, *key) not in runs)
            name = next(name for name in free if config == config_of.setdefault(name, config))
            name_of[path, own] = name
            runs[name, *key] = run if name == own else replace(run, config={**run.config, "algorithm": name}), folder
    if not runs and not running:
        raise RunError(
            f"{folders[0]}: no run is finished yet; look at it with fedattune watch, or go on with it by --resume"
        )
    ordered = sorted(runs.values(), key=lambda one: one[0].algorithm != BASELINE)
    _check_clients(list(runs.values()))
    experiment, results = read_experiment(folders[0]), [run for run, _ in ordered]
    notes = [note for path in folders for note in read_experiment_file(path, NOTES_FILE) or ()]
    metric = get_short_name(experiment.get("metric") or get_default_metric(results))
    if metric not in METRICS:  # no code runs because a folder names it
        notes.append(
            f"The verdict of this comparison is about {experiment['metric']}, a custom metric that is not loaded here, "
            f"so {get_default_metric(results)} is shown; in Python, import its file before reading the runs"
        )
        metric = get_default_metric(results)
    waiting = list(dict.fromkeys(waiting))
    sentences = list(dict.fromkeys(sentence for *_, sentence in failed.values()))
    methods = [name_of.get((path, own), own) for path, own, _ in failed.values()]
    growing = any(is_growing(path) for path in folders)
    rounds_to, baselines = experiment.get("rounds_to"), read_baselines(folders)
    is_tuned = bool(experiment.get("tune") or experiment.get("budget") not in (None, "off"))
    places = [folder for _, folder in ordered]
    return Runs(results, places, sentences, waiting, rounds_to, metric, baselines, notes, is_tuned, methods, growing)


def _strip_config(run: RunMetrics, *, is_tuned: bool = False) -> dict[str, Any]:
    """Return what makes runs further seeds and splits of one method; tuning chooses rate and options on each split."""
    hidden = {"algorithm", "seed", "split", *RESUMABLE_SETTINGS} | (
        {"lr", "options", "definition"} if is_tuned else set()
    )
    config = {key: value for key, value in run.config.items() if key not in hidden and value is not None}
    partition = {key: value for key, value in config.get("partition", {}).items() if key != "split"}
    return config | {"partition": partition}


def _check_clients(runs: Sequence[tuple[RunMetrics, Path]]) -> None:
    first_of: dict[int, RunMetrics] = {}
    for run, folder in runs:
        first, reason = runs[0][0], ""
        same_split = first_of.setdefault(run.split, run)
        is_other = _strip_config(run)["partition"] != _strip_config(first)["partition"]
        if is_other or run.config.get("split") != same_split.config.get("split"):
            reason = "data, partition or its seed differ"
        elif [one["id"] for one in run.facts["clients"]] != [one["id"] for one in first.facts["clients"]]:
            reason = "other clients were evaluated: --eval-clients or --held-out differ"
        if reason:
            raise RunError(
                f"{folder} and {runs[0][1]} are not of the same clients ({reason}), so they cannot be compared; look "
                "at them one by one"
            )


def find_run_folders(path: Path) -> list[Path]:
    """Find the folders of single runs, in the order of the experiment."""
    if RunFolder(path).config.is_file():
        return [path]
    # A run that has lost its config.json is one, and must not go missing without a word.
    marks = (CONFIG_FILE, CHECKSUM_FILE, *MARKS)
    folders = list({file.parent for name in marks for file in path.glob(f"{RUN_FOLDERS}/{name}")})
    if not folders and not (path / EXPERIMENT_FILE).is_file():
        missing = "" if path.exists() else " (there is no such folder)"
        raise RunError(f"{path} holds no run{missing}; give a folder that fedattune run or compare wrote")
    names = _list_methods(read_experiment(path))
    folders.sort(key=lambda run: (run.parent.name, natural_key(run.name)))
    folders.sort(key=lambda run: names.index(run.parent.name) if run.parent.name in names else len(names))
    return folders


def read_experiment(path: Path) -> dict[str, Any]:
    """Read the options of the experiment in a folder; none if it holds a single run."""
    file = path / EXPERIMENT_FILE
    verify_experiment(path, file)
    return read_yaml(file) if file.is_file() else {}


def _list_methods(experiment: Mapping[str, Any]) -> list[str]:
    names = experiment.get("algorithms", [])
    return [get_short_name(name) for name in (names.split(",") if isinstance(names, str) else names)]


def list_planned_runs(path: Path) -> Iterator[tuple[Path, str, int, int, int]]:
    """Yield folder, method, seed, split and rounds of the runs of the experiment in a folder, begun or not."""
    experiment = read_experiment(path)
    first, rounds = int(experiment.get("seed", 0)), int(experiment.get("rounds", 0))
    for name in _list_methods(experiment):
        for split in range(int(experiment.get("splits", 1))):
            for seed in range(first, first + int(experiment.get("seeds", 1))):
                yield path / make_run_name(name, split, seed), name, seed, split, rounds


def is_growing(path: Path) -> bool:
    """Return True for the folder of a comparison with a budget that has not ended, so that splits may be added.

    A comparison that was stopped has a result; one that goes on has taken it out of the checksums.
    """
    if read_experiment(path).get("budget") in (None, "off"):
        return False
    sums = read_checksums(path)
    return not (path / RESULT_FILE).exists() or (sums is not None and RESULT_FILE not in sums)


def read_failures(path: Path) -> dict[Path, tuple[str, str]]:
    """Read the runs of a comparison that failed: folder -> the method, and a sentence on the error."""
    if (path / CONFIG_FILE).is_file():  # a single run, whose result is another file of that name
        return {}
    content = read_experiment_file(path, RESULT_FILE) or {}
    failures = {}
    for one in content.get("failed", []):
        name, seed = one["algorithm"], one["seed"]
        folder = path / make_run_name(name, one.get("split", 0), seed)
        failures[folder] = name, describe_failure(name, seed, one["error"])
    return failures
