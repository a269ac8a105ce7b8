"""What the server of a real federation does: meet the nodes, run every method, say what came of it."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from flwr.serverapp import Grid

from ..cohorts import check_device
from ..core import Algorithm
from ..errors import DivergedError, RunError
from ..result import Result
from ..rounds import Progress, Run
from ..runs.folder import RunFolder, read_json, write_json
from .cohort import FlowerCohort
from .host import fingerprint, trained_module
from .meeting import Meeting
from .nodes import Nodes
from .options import Plan, Scalar

Say = Callable[[str], None]
FILE = "federation.json"
"""The server's file of what it met: nodes, clients, and the token of the run's memory on the nodes."""


def lead(
    grid: Grid, run_config: Mapping[str, Scalar], own: Mapping[str, Algorithm] | None = None, say: Say = print
) -> list[Result]:
    """Run every method of the configuration with every seed over the nodes of a grid, and return the results.

    It goes on where an earlier one with the same folder and configuration stopped. `own` are methods of the user's
    own, by name; `say` gets a sentence whenever something happens.

    Raises:
        ConfigError: a configuration that cannot be.
        DataError: nodes whose data do not fit together.
        RunError: too few nodes, or a folder of another run.

    """
    plan = Plan(run_config, own)
    folder = plan.deployment.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            return _lead(folder, plan, Nodes(grid, plan.deployment, say), say)
    except Timeout as error:
        raise RunError(f"run-folder: a run is going on in {folder}; stop it, or take a new folder") from error
    except OSError as error:
        raise RunError(f"run-folder: {folder} cannot be used: {error.strerror or error}") from error


def _lead(folder: Path, plan: Plan, nodes: Nodes, say: Say) -> list[Result]:
    token, meeting = _meet(folder, nodes, plan)
    n, sites = meeting.census.n_clients, len(meeting.sites)
    say(f"{n} clients at {sites} nodes, {len(meeting.census.classes)} classes; results go to {folder}")
    results = []
    for name, algorithm in plan.algorithms.items():
        for seed in plan.seeds:
            try:
                results.append(_train(folder, plan, name, algorithm, seed, nodes, meeting, token, say))
            except DivergedError as error:
                say(f"{name}, seed {seed}: {error}")
    if not results:
        raise RunError("no method finished: training diverged")
    _conclude(folder, results, say)
    return results


def _meet(folder: Path, nodes: Nodes, plan: Plan) -> tuple[str, Meeting]:
    """The run's token and its nodes; those of the folder, if it was begun before."""
    file, seed = folder / FILE, plan.experiment.split_seed or 0
    if file.exists():
        known = read_json(file)
        try:
            token, meeting = known["token"], Meeting.from_json(known, plan.deployment)
        except (KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged; take a new run-folder") from error
    elif any(not path.name.startswith(".") for path in folder.iterdir()):
        raise RunError(f"run-folder: {folder} is not empty and holds no federation; take a new folder")
    else:
        token, meeting = secrets.token_hex(8), Meeting.call(nodes, plan.deployment)
    write_json(file, {"token": token, **meeting.to_json()})
    return token, meeting.seeded(seed)


def _train(
    folder: Path,
    plan: Plan,
    name: str,
    algorithm: Algorithm,
    seed: int,
    nodes: Nodes,
    meeting: Meeting,
    token: str,
    say: Say,
) -> Result:
    census, settings = meeting.census, plan.settings(seed)
    settings.cohort_size(census.n_clients)
    check_device(settings)
    card = plan.card(name, seed, census.input_shape, census.classes)
    split = hashlib.sha256(json.dumps([census.names, census.counts]).encode()).hexdigest()
    config = {
        "algorithm": name,
        "definition": str(algorithm),
        "options": card["options"],
        "model": card["model"],
        "model_options": card["model_options"],
        "data": census.name,
        "partition": dict(census.partition),
        "split": split,
        **settings.model_dump(),
    }
    path = folder / name / f"seed-{seed}"
    kept = RunFolder.open(path, config, resume=(path / "config.json").exists())
    if kept.finished:
        return Result.load(path)
    module = trained_module(algorithm, card)
    key = {"token": token, "algorithm": name, "seed": seed, "model": fingerprint(module)}
    run = Run(
        algorithm,
        census,
        module,
        settings,
        config,
        kept,
        lambda run: FlowerCohort(run, nodes, meeting, key, say),
    )
    if run.record.round:
        say(f"{name}, seed {seed}: going on after round {run.record.round}")

    def watch(progress: Progress) -> None:
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.1f}"
        say(f"{name}, seed {seed}: round {progress.round} of {progress.rounds}{accuracy}")

    result = run.go(watch, lambda: False)
    assert isinstance(run.place, FlowerCohort)
    facts: dict[str, Any] = {"wire": {"up": run.place.bytes_got, "down": run.place.bytes_sent}}
    Result(result.config, {**result.facts, **facts}, result.store).finish(kept)
    return Result.load(path)


def _conclude(folder: Path, results: list[Result], say: Say) -> None:
    """Write what a comparison gives, and say it."""
    from ..cli.conclude import _notes
    from ..compare import ALONE, print_table, rows
    from ..files import write_text
    from ..reading import read_runs
    from ..report import write_report
    from ..text import make_console
    from ..verdict import verdict

    if not all(result.metrics for result in results):
        say("no node answered when clients were evaluated: there is nothing to compare")
        return
    names = {result.algorithm for result in results}
    decided = verdict(results).text if ALONE in names and len(names) > 1 else ""
    content = {"runs": [result.to_json() for result in results], "verdict": decided}
    write_text(folder / "result.json", json.dumps(content, indent=2))
    notes = list(dict.fromkeys(_notes(results)))
    write_report(folder / "report.html", read_runs([folder]))
    print_table(rows(results), make_console())
    for note in notes:
        say(f"note: {note}")
    if decided:
        say(decided)
    if ALONE not in names:
        say("note: run local beside it (algorithms='local,...'), or nobody can tell whether federating helps")
    say(f"The report is {folder / 'report.html'}; each client's model is on its node")
