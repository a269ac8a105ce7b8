"""Watch a deployment: its health, the numbers of its runs, and the state of its nodes in the run folder."""

import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

from ...analysis.monitor import NODES_FILE
from ...core.faults import Fault, FaultKind
from ...core.io import write_json
from ...runs.context import Progress
from ..config import DeploymentOptions
from .registration import NodeRegistry

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STALL_FACTOR = 3.0
"""Times the allowed time of the current messages, after which a run without a finished round is stalled."""

FaultLabel = Literal["offline", "removed", "late", "failed", "refused", "dropped"]
"""Label of a fault in metrics: `refused` is of a reply, `dropped` of the upload of one client."""

LABELS: Mapping[FaultKind, FaultLabel] = {
    "offline": "offline", "removed": "removed", "late": "late", "failed": "failed", "lost_state": "failed",
    "refused": "refused",
}  # fmt: skip
"""Kind of a node's fault -> its label; faults of other kinds are of single uploads."""


@dataclass
class RunNumbers:
    """The numbers of one method with one seed; None for what is not known yet."""

    planned: int
    done: int = 0
    accuracy: float | None = None
    rmse: float | None = None
    seconds: float | None = None
    sent: int = 0
    received: int = 0
    absent: int | None = None
    finished_at: float | None = None


METRICS_HOST = "127.0.0.1"
"""Address of the metrics: they have no login, so only this machine reaches them."""

RUN_GAUGES: Mapping[str, tuple[str, Callable[[RunNumbers], float | None]]] = {
    "rounds_done": ("Finished rounds.", lambda run: run.done),
    "rounds_planned": ("Rounds in all.", lambda run: run.planned),
    "accuracy": ("Mean test accuracy over clients, a fraction.", lambda run: run.accuracy),
    "rmse": ("Mean test RMSE over clients.", lambda run: run.rmse),
    "round_seconds": ("Seconds of the last round.", lambda run: run.seconds),
    "last_round_timestamp_seconds": ("Time of the last finished round.", lambda run: run.finished_at),
    "clients_without_reply": ("Clients of the last round's cohort without part in it.", lambda run: run.absent),
}
"""Metrics by method and seed; a run without the value has no sample."""

RUN_COUNTERS: Mapping[str, tuple[str, Callable[[RunNumbers], float]]] = {
    "sent_bytes": ("Bytes of tensors sent to nodes.", lambda run: run.sent),
    "received_bytes": ("Bytes of tensors received from nodes.", lambda run: run.received),
}


class RunMonitor:
    """The state of a deployment, which the server's thread writes and the threads of HTTP requests read."""

    def __init__(self, deployment: DeploymentOptions, folder: Path) -> None:
        self._deployment, self._folder = deployment, folder
        self._lock = threading.RLock()
        self._registry: NodeRegistry | None = None
        self._names: list[str] = []
        self._token: str | None = None
        self._runs: dict[tuple[str, int], RunNumbers] = {}
        self._current: tuple[str, int] | None = None
        self._online: set[int] = set()
        self._last_faults: dict[int, FaultLabel | None] = {}  # of each node's last message; None after a reply
        self._faults: Counter[tuple[int, FaultLabel]] = Counter()
        self._progress = self._round_began = time.monotonic()
        self._allowed = deployment.start_timeout

    def begin_federation(self, token: str, registry: NodeRegistry, online: set[int]) -> None:
        with self._lock:
            self._token, self._registry = token, registry
            # The clients' names would stand in for a missing name in `label`, but metrics name no clients.
            names = [hello.name[:100] or f"node {i}" for i, hello in enumerate(registry.hellos)]
            while len(set(names)) < len(names):
                names = [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]
            self._names = names
        self.record_online(online)

    def begin_run(self, method: str, seed: int, done: int, planned: int) -> None:
        """Take the following numbers for a method with a seed."""
        with self._lock:
            self._current = method, seed
            self._runs[method, seed] = RunNumbers(planned, done)
            self._progress = self._round_began = time.monotonic()
            self._allowed = self._deployment.round_timeout

    def record_exchange(self, faults: Mapping[int, Fault | None], sent: int, received: int) -> None:
        """Take note of the fault of each asked node, or None, and of the bytes of the run so far."""
        with self._lock:
            for i, fault in faults.items():
                self._last_faults[i] = label = LABELS.get(fault.kind) if fault else None
                if label:
                    self._faults[i, label] += 1
            if self._current:
                run = self._runs[self._current]
                run.sent, run.received = sent, received
        self._write()

    def record_dropped(self, nodes: Iterable[int]) -> None:
        """Count uploads of single clients that the server does not take, by the index of their node."""
        with self._lock:
            self._faults.update((i, "dropped") for i in nodes)

    def record_progress(self, progress: Progress, absent: int, *, is_empty: bool = False) -> None:
        with self._lock:
            assert self._current
            run, now = self._runs[self._current], time.monotonic()
            run.done, run.accuracy, run.rmse = progress.round, progress.accuracy, progress.rmse
            run.seconds, run.absent, run.finished_at = now - self._round_began, absent, time.time()
            self._round_began = now
            if not is_empty:
                self._progress = now
        self._write()

    def record_online(self, numbers: set[int]) -> None:
        """Take over which nodes are online, by Flower's numbers."""
        with self._lock:
            before, self._online = self._online, self._registry.list_online(numbers) if self._registry else numbers
            if before != self._online:
                self._write()

    def end_runs(self) -> None:
        """Take the following sentences of the log for sentences about all methods."""
        with self._lock:
            self._current = None
            self._progress = time.monotonic()

    def end(self) -> None:
        """Say in the run folder that no node works for this run any more."""
        with suppress(OSError):
            (self._folder / NODES_FILE).unlink(missing_ok=True)

    def get_fields(self, sentence: str) -> dict[str, Any]:
        with self._lock:
            method, seed = self._current or (None, None)
            found = re.search(r"\bround (\d+)", sentence)
            nodes = self._registry.nodes if self._registry else []
            named = [name for name, node in zip(self._names, nodes, strict=False) if node.label in sentence]
            return {
                "run": self._token,
                "method": method,
                "seed": seed,
                "round": int(found[1]) if found else None,
                "node": named[0] if len(named) == 1 else None,
            }

    def describe_health(self) -> tuple[bool, dict[str, Any]]:
        """Tell whether the run makes progress, and describe it: status, method, seed, round, nodes and a reason."""
        with self._lock:
            quiet, limit = time.monotonic() - self._progress, STALL_FACTOR * self._allowed
            reason = ""
            if not self._online:
                reason = "no node is online; look at the logs of the nodes"
            elif quiet > limit:
                reason = f"no round finished for {quiet:.0f} s, expected one in {limit:.0f} s; look at the run's log"
            method, seed = self._current or (None, None)
            run = self._runs[self._current] if self._current else None
            facts = {
                "status": "stalled" if reason else "running" if run else "waiting",
                "method": method,
                "seed": seed,
                "round": run.done if run else None,
                "rounds": run.planned if run else None,
                "seconds_since_progress": round(quiet, 1),
                "nodes_online": len(self._online),
                "nodes_known": len(self._names),
            }
            return not reason, {**facts, "reason": reason} if reason else facts

    def collect(self) -> "list[Metric]":
        """List the metrics at one moment, for Prometheus's registry. They name methods and nodes, but no clients."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        metrics: list[Metric] = []
        with self._lock:
            for columns, family in ((RUN_GAUGES, GaugeMetricFamily), (RUN_COUNTERS, CounterMetricFamily)):
                for name, (text, read) in columns.items():
                    metric = family(f"fedattune_{name}", text, labels=("method", "seed"))
                    for (method, seed), run in self._runs.items():
                        value = read(run)
                        if value is not None and not math.isnan(value):
                            metric.add_metric((method, str(seed)), value)
                    metrics.append(metric)
            last = Counter(self._last_faults.values())
            gauges = {
                "healthy": ("1 while the run makes progress, as /healthz says.", self.describe_health()[0]),
                "nodes_known": ("Nodes of the federation.", len(self._names)),
                "nodes_online": ("Nodes that are online.", len(self._online)),
                "nodes_late": ("Nodes that sent no reply in time to their last message.", last["late"]),
                "nodes_refused": ("Nodes whose last reply the server refused.", last["refused"]),
                "nodes_failed": ("Nodes that could not answer their last message.", last["failed"]),
            }
            metrics += [GaugeMetricFamily(f"fedattune_{name}", text, float(n)) for name, (text, n) in gauges.items()]
            online = GaugeMetricFamily("fedattune_node_online", "1 if the node is online.", labels=("node",))
            faults = CounterMetricFamily(
                "fedattune_faults", "Faults since the server's start.", labels=("node", "kind")
            )
            for i, node in enumerate(self._names):
                online.add_metric((node,), float(i in self._online))
                for kind in get_args(FaultLabel):
                    faults.add_metric((node, kind), self._faults[i, kind])
            return [*metrics, online, faults]

    def _write(self) -> None:
        """Write the state of the nodes for `fedattune watch`; a full disk must not end the run here."""
        with self._lock, suppress(OSError):
            if self._registry:
                nodes = [
                    {"name": name, "online": i in self._online, "fault": self._last_faults.get(i)}
                    for i, name in enumerate(self._names)
                ]
                write_json(self._folder / NODES_FILE, {"nodes": nodes})


@contextmanager
def serve_metrics(monitor: RunMonitor, port: int, log: Callable[[str], None]) -> Iterator[None]:
    """Serve `/metrics` and `/healthz` on loopback; if that is impossible, say so once and go on without."""
    server = None
    if port:
        try:
            server = _start_server(monitor, port)
        except ImportError:
            log(
                "metrics-port: the package prometheus-client is missing, so the run goes on without metrics; install "
                "FedAttune's extra `flower` again, or set metrics-port=0"
            )
        except OSError as error:
            log(
                f"metrics-port: port {port} cannot be used ({error.strerror or error}), so the run goes on without "
                "metrics; choose a free port, or set metrics-port=0"
            )
    try:
        yield
    finally:
        monitor.end()
        if server:
            server.shutdown()
            server.server_close()


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # a client that sends nothing must not hold a thread

    def handle(self) -> None:
        with suppress(TimeoutError, ConnectionError):  # else each such client puts a traceback into the run's log
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Log nothing: scrapes would fill the run's log."""


def _start_server(monitor: RunMonitor, port: int) -> Any:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    registry = CollectorRegistry()
    registry.register(monitor)
    answer_metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return answer_metrics(environ, start)
        if path != "/healthz":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected /metrics or /healthz\n"]
        is_healthy, facts = monitor.describe_health()
        status = "200 OK" if is_healthy else "503 Service Unavailable"
        start(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [json.dumps(facts).encode() + b"\n"]

    server = make_server(METRICS_HOST, port, answer, ThreadingWSGIServer, _QuietHandler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
