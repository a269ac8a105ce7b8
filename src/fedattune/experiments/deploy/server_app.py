"""What the server of a real federation does: meet the nodes, run every method, say what came of it.

The Flower ServerApp: the round loop of a simulation, over the nodes of a grid.
"""

import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...core.algorithm import Algorithm
from ...core.errors import DivergedError, FedAttuneError, RunError
from ...core.hardware import check_device
from ...core.io import read_json, write_json
from ...training.client_state import Sender
from ...training.context import Progress, RunContext
from ...training.loop import RoundLoop
from ...training.result import Result
from ...training.storage.folder import RunFolder
from .backend import FlowerBackend
from .config import DeploymentPlan, Scalar
from .grid import NodeGrid
from .node import build_trained_model, hash_model
from .registration import NodeRegistry

Log = Callable[[str], None]


FEDERATION_FILE = "federation.json"
"""The server's file of what it met: nodes, clients, and the token of the run's memory on the nodes."""


def run_server(
    grid: Grid, run_config: Mapping[str, Scalar], own: Mapping[str, Algorithm] | None = None, say: Log = print
) -> list[Result]:
    """Run every method of the configuration with every seed over the nodes of a grid, and return the results.

    It goes on where an earlier one with the same folder and configuration stopped. `own` are methods of the user's
    own, by name; `say` gets a sentence whenever something happens.

    Raises:
        ConfigError: a configuration that cannot be.
        DataError: nodes whose data do not fit together.
        RunError: too few nodes, or a folder of another run.

    """
    plan = DeploymentPlan(run_config, own)
    folder = plan.deployment.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            return _run_server(folder, plan, NodeGrid(grid, plan.deployment, say), say)
    except Timeout as error:
        raise RunError(f"run-folder: a run is going on in {folder}; stop it, or take a new folder") from error
    except OSError as error:
        raise RunError(f"run-folder: {folder} cannot be used: {error.strerror or error}") from error


def _run_server(folder: Path, plan: DeploymentPlan, nodes: NodeGrid, say: Log) -> list[Result]:
    token, meeting = _open_registry(folder, nodes, plan)
    n, sites = meeting.census.n_clients, len(meeting.sites)
    say(f"{n} clients at {sites} nodes, {len(meeting.census.classes)} classes; results go to {folder}")
    results = []
    for name, algorithm in plan.algorithms.items():
        for seed in plan.seeds:
            try:
                results.append(_run_method(folder, plan, name, algorithm, seed, nodes, meeting, token, say))
            except DivergedError as error:
                say(f"{name}, seed {seed}: {error}")
    if not results:
        raise RunError("no method finished: training diverged")
    _write_results(folder, results, say)
    return results


def _open_registry(folder: Path, nodes: NodeGrid, plan: DeploymentPlan) -> tuple[str, NodeRegistry]:
    """The run's token and its nodes; those of the folder, if it was begun before."""
    file, seed = folder / FEDERATION_FILE, plan.experiment.split_seed or 0
    if file.exists():
        known = read_json(file)
        try:
            token, meeting = known["token"], NodeRegistry.from_json(known, plan.deployment)
        except (KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged; take a new run-folder") from error
    elif any(not path.name.startswith(".") for path in folder.iterdir()):
        raise RunError(f"run-folder: {folder} is not empty and holds no federation; take a new folder")
    else:
        token, meeting = secrets.token_hex(8), NodeRegistry.call(nodes, plan.deployment)
    write_json(file, {"token": token, **meeting.to_json()})
    return token, meeting.seeded(seed)


def _run_method(
    folder: Path,
    plan: DeploymentPlan,
    name: str,
    algorithm: Algorithm,
    seed: int,
    nodes: NodeGrid,
    meeting: NodeRegistry,
    token: str,
    say: Log,
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
    if kept.is_finished:
        return Result.load(path)
    module = build_trained_model(algorithm, card)
    key = {"token": token, "algorithm": name, "seed": seed, "model": hash_model(module)}
    backends: list[FlowerBackend] = []

    def make_backend(context: RunContext, send: Sender) -> FlowerBackend:
        backends.append(FlowerBackend(context, send, nodes, meeting, key, say))
        return backends[0]

    loop = RoundLoop(algorithm, census, module, settings, config, kept, make_backend)
    if loop.record.round:
        say(f"{name}, seed {seed}: going on after round {loop.record.round}")

    def watch(progress: Progress) -> None:
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.1f}"
        say(f"{name}, seed {seed}: round {progress.round} of {progress.rounds}{accuracy}")

    result = loop.run(watch, lambda: False)
    facts: dict[str, Any] = {"wire": {"up": backends[0].bytes_got, "down": backends[0].bytes_sent}}
    Result(result.config, {**result.facts, **facts}, result.store).finish(kept)
    return Result.load(path)


def _write_results(folder: Path, results: list[Result], say: Log) -> None:
    """Write what a comparison gives, and say it."""
    from ...analysis.compare import BASELINE, build_rows
    from ...analysis.load import read_runs
    from ...analysis.report import write_report
    from ...analysis.tables import make_console, print_methods
    from ...analysis.verdict import merge_notes, reach_verdict
    from ...core.io import write_text

    if not all(result.metrics for result in results):
        say("no node answered when clients were evaluated: there is nothing to compare")
        return
    names = {result.algorithm for result in results}
    decided = reach_verdict(results).text if BASELINE in names and len(names) > 1 else ""
    content = {"runs": [result.to_json() for result in results], "verdict": decided}
    write_text(folder / "result.json", json.dumps(content, indent=2))
    notes = list(dict.fromkeys(merge_notes(results)))
    write_report(folder / "report.html", read_runs([folder]))
    print_methods(build_rows(results), make_console())
    for note in notes:
        say(f"note: {note}")
    if decided:
        say(decided)
    if BASELINE not in names:
        say("note: run local beside it (algorithms='local,...'), or nobody can tell whether federating helps")
    say(f"The report is {folder / 'report.html'}; each client's model is on its node")


def make_server_app(own: Mapping[str, Algorithm] | None = None) -> ServerApp:
    """A ServerApp that also knows methods of the user's own, by name.

    A module that assigns it to `app` is named under `serverapp` in the app's pyproject.toml.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_server(
                grid, context.run_config, own, lambda sentence: print(f"fedattune: {sentence}", flush=True)
            )
        except FedAttuneError as error:
            sys.exit(f"fedattune: error: {error}")

    return app


app = make_server_app()
