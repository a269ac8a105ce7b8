"""Prometheus metrics of a deployment, and their HTTP server."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

from ..server.monitoring import FaultLabel, RunMonitor, RunNumbers, Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS_HOST = "127.0.0.1"
"""Address of the metrics: they have no login, so only this machine reaches them."""

RUN_GAUGES: Mapping[str, tuple[str, Callable[[RunNumbers], float | None]]] = {
    "rounds_done": ("Finished rounds.", lambda run: run.done),
    "rounds_planned": ("Rounds in all.", lambda run: run.planned),
    "accuracy": ("Mean test accuracy over clients, a fraction.", lambda run: run.accuracy),
    "rmse": ("Mean test RMSE over clients.", lambda run: run.rmse),
    "round_seconds": ("Seconds of the last round.", lambda run: run.seconds),
    "last_round_timestamp_seconds": ("Time of the last finished round.", lambda run: run.finished_at),
    "clients_without_reply": (
        "Clients of the last round's cohort without part in it.",
        lambda run: run.absent,
    ),
}
"""Metrics by method and seed; a run without the value has no sample."""

RUN_COUNTERS: Mapping[str, tuple[str, Callable[[RunNumbers], float]]] = {
    "sent_bytes": ("Bytes of tensors sent to nodes.", lambda run: run.sent),
    "received_bytes": ("Bytes of tensors received from nodes.", lambda run: run.received),
}

NODE_GAUGES: Mapping[str, tuple[str, Callable[[Snapshot], float]]] = {
    "healthy": ("1 while the run makes progress, as /healthz says.", lambda now: now.is_healthy),
    "nodes_known": ("Nodes of the federation.", lambda now: len(now.names)),
    "nodes_online": ("Nodes that are online.", lambda now: len(now.online)),
    "nodes_late": (
        "Nodes that sent no reply in time to their last message.",
        lambda now: _count(now, "late"),
    ),
    "nodes_refused": ("Nodes whose last reply the server refused.", lambda now: _count(now, "refused")),
    "nodes_failed": ("Nodes that could not answer their last message.", lambda now: _count(now, "failed")),
}


def _count(now: Snapshot, kind: FaultLabel) -> int:
    return Counter(now.last_faults.values())[kind]


class MetricsCollector:
    """The metrics of a deployment, for Prometheus's registry. They name methods and nodes, but no clients.

    Args:
        monitor: the state of the deployment.

    """

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics at one moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._monitor.take_snapshot()
        for columns, family in ((RUN_GAUGES, GaugeMetricFamily), (RUN_COUNTERS, CounterMetricFamily)):
            for name, (text, read) in columns.items():
                metric = family(f"fedattune_{name}", text, labels=("method", "seed"))
                for (method, seed), run in now.runs.items():
                    value = read(run)
                    if value is not None and not math.isnan(value):
                        metric.add_metric((method, str(seed)), value)
                yield metric
        for name, (text, count) in NODE_GAUGES.items():
            yield GaugeMetricFamily(f"fedattune_{name}", text, float(count(now)))
        online = GaugeMetricFamily("fedattune_node_online", "1 if the node is online.", labels=("node",))
        faults = CounterMetricFamily(
            "fedattune_faults", "Faults since the server's start.", labels=("node", "kind")
        )
        for i, node in enumerate(now.names):
            online.add_metric((node,), float(i in now.online))
            for kind in get_args(FaultLabel):
                faults.add_metric((node, kind), now.faults.get((i, kind), 0))
        yield online
        yield faults


@contextmanager
def serve_metrics(monitor: RunMonitor, port: int, log: Callable[[str], None]) -> Iterator[None]:
    """Serve `/metrics` and `/healthz` on loopback; if that is impossible, say so once and go on without.

    Args:
        monitor: the state of the deployment.
        port: the port; 0 serves nothing.
        log: called with a sentence for the user.

    """
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

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Log nothing: scrapes would fill the run's log."""


def _start_server(monitor: RunMonitor, port: int) -> Any:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    registry = CollectorRegistry()
    registry.register(MetricsCollector(monitor))
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
