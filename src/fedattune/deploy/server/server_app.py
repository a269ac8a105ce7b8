"""The Flower ServerApp: the round loop of a simulation over the nodes of a grid, then a comparison of the results."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...analysis.folder import EXPERIMENT_FILE, seal_experiment
from ...analysis.monitor import FEDERATION_FILE
from ...core.algorithm import Algorithm
from ...core.errors import DivergedError, FedAttuneError, RunError, summarize_error
from ...core.hardware import check_device
from ...core.io import read_json, write_json, write_text
from ...core.lock import lock_folder
from ...core.text import make_printable
from ...runs.callbacks import OnRound
from ...runs.context import Progress, RunContext
from ...runs.folder import RunFolder
from ...runs.result import Result
from ...training.clients.options import check_clients
from ...training.clients.state import PayloadFactory
from ...training.loop import RoundLoop
from ..config import DeploymentPlan, Scalar
from ..grid import NodeGrid
from ..logs import log_errors, make_server_log
from ..node.node import build_initial_model, check_methods, hash_model
from ..operate.kit import list_removed
from ..secagg.transport import SecureTransport
from .backend import NodeBackend, NodeTransport
from .control import ControlRequest, open_requests, read_request, write_request
from .monitoring import RunMonitor, serve_metrics
from .registration import NodeRegistry

Log = Callable[[str], None]
"""Called with a sentence for the user."""


def run_server(
    grid: Grid,
    run_config: Mapping[str, Scalar],
    custom_algorithms: Mapping[str, Algorithm] | None = None,
    log: Log | None = None,
    list_removed: Callable[[], frozenset[int]] = frozenset,
) -> list[Result]:
    """Run every method of the configuration with every seed over the nodes of a grid.

    A run continues from its last round if the folder holds one with the same configuration. The run ends early if the
    administrator asks it to pause or to end (see `write_request`).

    Args:
        log: called with a sentence for the user; by default it prints lines in the format of `log-format`.
        list_removed: lists Flower's numbers of the nodes whose keys were removed, which the grid does not tell.

    Returns:
        The results of all runs that finished.
    """
    plan = DeploymentPlan(run_config, custom_algorithms)
    folder = plan.deployment.run_folder
    monitor = RunMonitor(plan.deployment, folder)
    log = log or make_server_log(plan.deployment.log_format, monitor.get_fields)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            log_errors(plan.deployment.log_format, monitor.get_fields),
            lock_folder(folder),
            serve_metrics(monitor, plan.deployment.metrics_port, log),
        ):
            if (folder / FEDERATION_FILE).exists():
                open_requests(folder)
            node_grid = NodeGrid(grid, plan.deployment, log, monitor.record_online, list_removed)
            server = _Server(plan, folder, node_grid, monitor)
            results = list(server.run())
            monitor.end_runs()
            request = server.request
            if request == "pause":
                write_request(folder, None)
                log("the run is paused and everything is saved; ./run.sh continues it")
                return results
            if request and not results:
                log("the run is aborted, and no method had finished: there is nothing to compare")
                return results
            if request:
                log("the run is aborted; the results are of the methods that had finished")
            elif not results:
                raise RunError("no method finished: training diverged; lower the learning rate")
            _write_results(folder, results, log, has_table=plan.deployment.log_format == "text")
            return results
    except OSError as error:
        raise RunError(f"run-folder: {folder} cannot be used: {error.strerror or error}") from error


class _Server:
    """The runs of a plan over the nodes of a federation."""

    def __init__(self, plan: DeploymentPlan, folder: Path, grid: NodeGrid, monitor: RunMonitor) -> None:
        self.plan, self.folder, self.grid, self.monitor = plan, folder, grid, monitor
        self.request: ControlRequest | None = None  # the request that ended the run; it may be taken back later
        self._open_registry()
        info = self.registry.info
        target = f"{len(info.labels)} labels" if info.labels else f"{len(info.classes)} classes"
        grid.log(f"{info.n_clients} clients at {len(self.registry.nodes)} nodes, {target}; results go to {folder}")

    def _open_registry(self) -> None:
        """Read the token and the nodes from the folder, or register the nodes of a new federation."""
        file, deployment = self.folder / FEDERATION_FILE, self.plan.deployment
        seed = self.plan.experiment.split_seed or 0
        if file.exists():
            content = read_json(file)
            try:
                self.token, registry = content["token"], NodeRegistry.from_json(content, deployment, seed)
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(f"{file} is damaged; take a new run-folder") from error
        elif any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise RunError(f"run-folder: {self.folder} is not empty and holds no federation; take a new folder")
        else:
            self.token, registry = secrets.token_hex(8), NodeRegistry.register(self.grid, deployment, seed)
        registry.takes_newcomers = len(self.plan.algorithms) * len(self.plan.seeds) == 1
        self.registry = registry
        check_methods(self.plan, registry.info)
        self._begin_federation()
        # Runs of another configuration refuse this one here, before it takes the place of theirs in experiment.yaml.
        for name, algorithm in self.plan.algorithms.items():
            for seed in self.plan.seeds:
                if RunFolder(self._find_run(name, seed)).config.exists():
                    self._open_folder(name, algorithm, seed)
        # From this file, `fedattune watch` knows the methods that have not begun.
        write_text(self.folder / EXPERIMENT_FILE, self.plan.experiment.to_yaml())
        seal_experiment(self.folder)

    def _begin_federation(self) -> None:
        """Write down the nodes, and let the monitor know them."""
        write_json(self.folder / FEDERATION_FILE, {"token": self.token, **self.registry.to_json()})
        self.monitor.begin_federation(self.token, self.registry, self.grid.online())

    def run(self) -> Iterator[Result]:
        """Run every method with every seed; skip runs that diverge, and end at a request."""
        for name, algorithm in self.plan.algorithms.items():
            for seed in self.plan.seeds:
                if self._should_stop():
                    return
                try:
                    result = self._run_method(name, algorithm, seed)
                    if result is None:  # the administrator asked for it
                        return
                    yield result
                except DivergedError as error:
                    self.grid.log(f"{name}, seed {seed}: {error}")

    def _should_stop(self) -> bool:
        self.request = self.request or read_request(self.folder)
        return self.request is not None

    def _run_method(self, name: str, algorithm: Algorithm, seed: int) -> Result | None:
        """Run a method with a seed; return None if a request ended it before its last round."""
        run_folder, config = self._open_folder(name, algorithm, seed)
        settings = self.plan.settings(seed)
        if run_folder.is_finished:
            self.monitor.begin_run(name, seed, settings.rounds, settings.rounds)
            return Result.load(run_folder.path)
        loop, transport = self._open_loop(name, algorithm, seed, run_folder, config)
        while True:
            result = loop.run([OnRound(partial(self._end_round, loop, name, seed))])
            if loop.record.round == settings.rounds:
                break
            if self._should_stop():
                self.grid.log(f"{name}, seed {seed}: stopped after round {loop.record.round} of {settings.rounds}")
                return None
            loop.store.close()
            self.registry.admit_newcomers()
            self._begin_federation()
            run_folder, config = self._open_folder(name, algorithm, seed)
            loop, transport = self._open_loop(name, algorithm, seed, run_folder, config)
        wire = {"up": transport.bytes_received, "down": transport.bytes_sent}
        facts = {**result.facts, "wire": wire, "notes": [*result.notes, *transport.common_notes, *self.registry.notes]}
        Result(result.config, facts, result.store).finish(run_folder)
        return Result.load(run_folder.path)

    def _end_round(self, loop: RoundLoop, name: str, seed: int, progress: Progress) -> bool:
        absent, n = len(loop.record.absent), loop.context.settings.participation.cohort_size(loop.context.n_clients)
        self.monitor.record_progress(progress, absent, is_empty=absent >= n)
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.1f}"
        if accuracy and progress.evaluated not in (0, progress.round):  # 0: an older checkpoint does not tell
            accuracy += f" after round {progress.evaluated}"
        self.grid.log(f"{name}, seed {seed}: round {progress.round} of {progress.rounds}{accuracy}")
        return progress.round < progress.rounds and (self._should_stop() or self._can_grow(loop))

    def _can_grow(self, loop: RoundLoop) -> bool:
        """Tell whether nodes wait to join, and the method can take them; refuse them otherwise."""
        if not self.registry.n_newcomers:
            return False
        try:
            loop.server.add_clients(loop.server.state, loop.context.n_clients, self.registry.n_newcomers)
        except Exception as error:  # the rule may be custom
            self.registry.refuse_newcomers(self.grid, summarize_error(error))
            return False
        return True

    def _find_run(self, name: str, seed: int) -> Path:
        return self.folder / name / f"seed-{seed}"

    def _open_folder(self, name: str, algorithm: Algorithm, seed: int) -> tuple[RunFolder, dict[str, Any]]:
        """Open the folder of a method with a seed, and return it with the run's config.

        Nodes may have joined the federation since the folder was made.
        """
        settings, path, splits = self.plan.settings(seed), self._find_run(name, seed), self.registry.splits
        settings.participation.cohort_size(self.registry.info.n_clients)
        check_device(settings)
        check_clients(settings, self.registry.info)
        card = self._make_card(name, seed)
        config = {
            "algorithm": name,
            "definition": str(algorithm),
            **{key: card[key] for key in ("options", "model", "model_options")},
            "data": self.registry.info.name,
            "partition": dict(self.registry.info.partition),
            "split": splits[-1],
            **settings.to_config(),
        }
        folder = RunFolder(path)
        if folder.config.exists() and not folder.is_finished:
            before = folder.read_config()
            if before.get("split") in splits[:-1]:
                write_json(folder.config, {**before, "split": splits[-1]})
                folder.seal_start()
        return RunFolder.open(path, config, resume=folder.config.exists()), config

    def _make_card(self, name: str, seed: int) -> dict[str, Any]:
        return self.plan.card(name, seed, self.registry.info)

    def _open_loop(
        self, name: str, algorithm: Algorithm, seed: int, folder: RunFolder, config: dict[str, Any]
    ) -> tuple[RoundLoop, NodeTransport]:
        """Prepare the first round, or the round after the last checkpoint."""
        module = build_initial_model(algorithm, self._make_card(name, seed))
        about = {"model": hash_model(module), "configuration": self.plan.digest}
        key = {"token": self.token, "algorithm": name, "seed": seed, **about}
        transports: list[NodeTransport] = []

        def make_backend(context: RunContext, make_payload: PayloadFactory) -> NodeBackend:
            make = SecureTransport if self.plan.deployment.secure_aggregation else NodeTransport
            transports.append(make(context, make_payload, self.grid, self.registry, key, self.monitor))
            return NodeBackend(context, make_payload, transports[0])

        info, settings = self.registry.info, self.plan.settings(seed)
        loop = RoundLoop(algorithm, info, module, settings, config, folder, make_backend)
        if loop.record.round:
            self.grid.log(f"{name}, seed {seed}: continuing after round {loop.record.round}")
        self.monitor.begin_run(name, seed, loop.record.round, settings.rounds)
        return loop, transports[0]


def _write_results(folder: Path, results: list[Result], log: Log, *, has_table: bool) -> None:
    from ...analysis.compare import BASELINE
    from ...analysis.output.tables import make_console, print_methods
    from ...experiments.session import write_summary

    if not all(result.metrics for result in results):
        log("no node replied when clients were evaluated: there is nothing to compare")
        return
    names = {result.algorithm for result in results}
    summary = write_summary(results, files=[folder / "result.json"], report=folder / "report.html")
    if has_table:
        print_methods(summary.rows, make_console())
    for note in dict.fromkeys(summary.notes):
        log(f"note: {note}")
    if summary.verdict and BASELINE in names and len(names) > 1:
        log(summary.verdict.text)
    if BASELINE not in names:
        log("note: add local (algorithms='local,...'); only a comparison with it shows whether federating helps")
    log(f"The report is {summary.report}; each client's model is on its node")


def _drop_traceback(record: logging.LogRecord) -> bool:
    """Leave out the traceback of an error for the user, whose sentence says all."""
    if record.exc_info and isinstance(record.exc_info[1], FedAttuneError):
        record.exc_info = None
    return True


def make_server_app(custom_algorithms: Mapping[str, Algorithm] | None = None) -> ServerApp:
    """Make a ServerApp, with your own methods by name.

    Assign it to `app` in a module, and name that module under `serverapp` in the app's pyproject.toml.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_server(grid, context.run_config, custom_algorithms, list_removed=partial(list_removed, Path()))
        except FedAttuneError as error:
            # Flower reports an exception as the run's status. It takes SystemExit for a process that died.
            print(make_printable(f"fedattune: error: {error}"), flush=True)
            logging.getLogger("flwr").addFilter(_drop_traceback)
            raise type(error)(str(error)) from None

    return app


app = make_server_app()
