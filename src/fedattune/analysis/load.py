"""Read runs from their folders, finished or not, to be looked at beside each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import RunError, did_you_mean, summarize_error
from ..core.io import read_json
from ..training.metrics import RunMetrics
from ..training.storage import RunStore
from ..training.storage.folder import RESUMABLE_SETTINGS, RunFolder
from .compare import BASELINE
from .verdict import Verdict, reach_verdict

EXPERIMENT_FILE = "experiment.yaml"


@dataclass(frozen=True)
class Runs:
    """Runs on the same clients; `waiting` are folders of runs in which no round is finished yet."""

    results: list[RunMetrics]
    folders: list[Path]
    failed: list[str]
    waiting: list[Path]
    rounds_to: float | None = None  # a mean test accuracy that was asked for

    @property
    def finished(self) -> bool:
        """Whether all runs came to their end."""
        return not self.waiting and all(run.finished for run in self.results)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on these runs, as far as they have come."""
        return reach_verdict(self.results, has_failures=bool(self.failed), is_final=self.finished)

    @property
    def title(self) -> str:
        """The data and the number of clients."""
        if not self.results:
            return "no round finished yet"
        first = self.results[0]
        return f"{first.config['data']}: {first.n_clients:,} clients"

    def select(self, algorithm: str | None, seed: int | None) -> list[tuple[RunMetrics, Path]]:
        """Return the runs of one method and seed, None for all, with their folders.

        Raises:
            RunError: there is no such run.

        """
        names = list(dict.fromkeys(run.algorithm for run in self.results))
        if algorithm is not None and algorithm not in names:
            raise RunError(f"no run of {algorithm!r} here; {did_you_mean(algorithm, names)}")
        found = [
            (run, folder)
            for run, folder in zip(self.results, self.folders, strict=True)
            if algorithm in (None, run.algorithm)
        ]
        seeds = ", ".join(map(str, sorted({run.settings.seed for run, _ in found})))
        found = [one for one in found if seed in (None, one[0].settings.seed)]
        if not found:
            method = f" of {algorithm}" if seed in [run.settings.seed for run in self.results] else ""
            raise RunError(f"no run{method} with seed {seed} here; give one of the seeds {seeds}")
        return found


def read_run(path: Path, *, copy: bool = True) -> RunMetrics | None:
    """Read the metrics of one run, which may still train; None before its first round is stored.

    Args:
        path: the run's folder.
        copy: copy the store into memory; without it, one answer may be newer than the one before.

    Raises:
        RunError: there is no run, or it is damaged.

    """
    folder = RunFolder(path)
    finished = folder.is_finished
    file = folder.result if finished else folder.facts
    if not folder.metrics.exists() or not file.exists():
        return None
    config = read_json(folder.config)
    store = RunStore.load_copy(folder.metrics) if copy else RunStore.open_read_only(folder.metrics)
    try:
        facts = read_json(file)
        run = RunMetrics(config, {"notes": [], **(facts["facts"] if finished else facts)}, store, finished)
        _ = run.settings, run.algorithm, run.facts["clients"], run.headline
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise RunError(
            f"{path} is damaged, or of another version of FedAttune: {file.name} or {folder.config.name} lacks what "
            f"belongs there ({summarize_error(error)})"
        ) from error
    return run if store.rounds() else None


def read_runs(paths: Sequence[Path | str], *, running: bool = False) -> Runs:
    """The runs in folders that `run` or `compare` wrote, or that are one of their runs.

    A run that is in two folders counts once. Runs of one method with other options, which are no further seeds of it,
    are told apart by the folder's name.

    Args:
        paths: the folders.
        running: take also runs that are still trained, or that were stopped.

    Raises:
        RunError: a folder holds no run, none that is finished, or the runs are not of the same clients.

    """
    results: dict[tuple[str, int], RunMetrics] = {}
    read: list[RunMetrics] = []  # as they call themselves
    asked: dict[str, dict[str, Any]] = {}  # name -> what its runs have in common
    folders: list[Path] = []
    failed: list[str] = []
    waiting: list[Path] = []
    seen: set[Path] = set()
    places = [Path(path) for path in paths]
    for path in places:
        given_up = read_failures(path)
        waiting += [
            folder for folder, *_ in list_planned_runs(path) if not folder.exists() and folder not in given_up
        ]
        for folder in find_run_folders(path):
            if folder.resolve() in seen or folder in given_up:
                continue
            seen.add(folder.resolve())
            run = read_run(folder)
            if run is None or not (run.finished or running):
                waiting.append(folder)
                continue
            if any(_is_same_run(other, run) for other in read):
                continue
            read.append(run)
            own, seed = run.algorithm, run.settings.seed
            # Every folder is read once, so the last of these names is free.
            label = path if folder == path else path.resolve().name
            apart = (own, *(f"{own} ({place})" for place in (label, path, folder, len(read))))
            name = next(
                name
                for name in apart
                if (name, seed) not in results
                and _defining_config(run) == asked.setdefault(name, _defining_config(run))
            )
            results[name, seed] = replace(run, config={**run.config, "algorithm": name})
            folders.append(folder)
        failed += [line for line in given_up.values() if line not in failed]
    if not results and not running:
        raise RunError(
            f"{places[0]}: no run is finished yet; look at it with fedattune watch, or go on with it by --resume"
        )
    found = list(results.values())
    clients = [one["id"] for one in found[0].facts["clients"]] if found else []
    for run, folder in zip(found, folders, strict=True):
        differ = (
            "data, partition or its seed differ"
            if run.config.get("split") != found[0].config.get("split")
            else ""
        )
        if not differ and [one["id"] for one in run.facts["clients"]] != clients:
            differ = "other clients were evaluated: --eval-clients or --held-out differ"
        if differ:
            raise RunError(
                f"{folder} and {folders[0]} are not of the same clients ({differ}), so they cannot be compared; look "
                "at them one by one"
            )
    order = sorted(range(len(found)), key=lambda i: found[i].algorithm != BASELINE)
    return Runs(
        [found[i] for i in order],
        [folders[i] for i in order],
        failed,
        list(dict.fromkeys(waiting)),
        read_experiment(places[0]).get("rounds_to"),
    )


def list_run_files(paths: Sequence[Path]) -> dict[str, Path]:
    """The files of runs, which no other result may be written over."""
    files: dict[str, Path] = {}
    for path in paths:
        own = [path / name for name in (EXPERIMENT_FILE, "result.json", "partition.json", "command.txt")]
        single = [RunFolder(found) for found in (path, *path.glob("*/seed-*"))]
        own += [
            file
            for run in single
            for file in (
                *(run.config, run.facts, run.environment, run.metrics, run.models, run.inputs, run.result),
                *(run.path / "checkpoints").glob("*"),
            )
        ]
        files |= {f"{file.relative_to(path)} of {path}": file for file in own if file.is_file()}
    return files


def find_run_folders(path: Path) -> list[Path]:
    """The folders of single runs, in the order in which they were asked for."""
    if RunFolder(path).config.is_file():
        return [path]
    found = [file.parent for file in path.glob("*/seed-*/config.json")]
    found.sort(key=lambda run: (run.parent.name, _seed_of_folder(run), run.name))
    if not found and not (path / EXPERIMENT_FILE).is_file():
        missing = "" if path.exists() else " (there is no such folder)"
        raise RunError(f"{path} holds no run{missing}; give a folder that fedattune run or compare wrote")
    asked = read_experiment(path).get("algorithms", [])
    names = asked.split(",") if isinstance(asked, str) else list(asked)
    found.sort(key=lambda run: names.index(run.parent.name) if run.parent.name in names else len(names))
    return found


def read_experiment(path: Path) -> dict[str, Any]:
    """What the comparison in a folder was asked to do; empty where it holds a single run."""
    from ..core.io import read_yaml

    return read_yaml(path / EXPERIMENT_FILE) if (path / EXPERIMENT_FILE).is_file() else {}


def list_planned_runs(path: Path) -> Iterator[tuple[Path, str, int, int]]:
    """Folder, method, seed and rounds of the runs that the comparison in a folder was asked for, begun or not."""
    asked = read_experiment(path)
    names, first = asked.get("algorithms", []), int(asked.get("seed", 0))
    for name in names.split(",") if isinstance(names, str) else names:
        for seed in range(first, first + int(asked.get("seeds", 1))):
            yield path / name / f"seed-{seed}", name, seed, int(asked.get("rounds", 0))


def _seed_of_folder(folder: Path) -> int:
    """The seed by the folder's name, so that 2 comes before 10."""
    number = folder.name.removeprefix("seed-")
    return int(number) if number.isdecimal() else -1


def _defining_config(run: RunMetrics) -> dict[str, Any]:
    """What a run was asked to do, but for its seed and what changes no result."""
    hidden = {"algorithm", "seed", *RESUMABLE_SETTINGS}
    return {key: value for key, value in run.config.items() if key not in hidden and value is not None}


def _is_same_run(one: RunMetrics, other: RunMetrics) -> bool:
    """Whether both are the same run, which would give the same numbers."""
    names = (
        (one.algorithm, one.settings.seed, one.rounds),
        (other.algorithm, other.settings.seed, other.rounds),
    )
    return names[0] == names[1] and _defining_config(one) == _defining_config(other)


def read_failures(path: Path) -> dict[Path, str]:
    """The runs of a comparison that did not come to an end, and what it says of them."""
    file = path / "result.json"
    found = read_json(file).get("failed", []) if file.is_file() else []
    return {
        path
        / one["algorithm"]
        / f"seed-{one['seed']}": f"{one['algorithm']} failed with seed {one['seed']}: {one['error']}"
        for one in found
    }
