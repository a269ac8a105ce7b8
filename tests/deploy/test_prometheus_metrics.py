"""Metrics and health over HTTP during a run, and the files for Prometheus and Grafana that use them."""

import json
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="a real federation needs Flower")
pytest.importorskip("prometheus_client", reason="metrics need prometheus-client")

from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.parser import text_string_to_metric_families

from fedattune import Federation
from fedattune.deploy.config import DeploymentOptions
from fedattune.deploy.operate.kit import write_kit
from fedattune.deploy.server import monitoring
from fedattune.deploy.server.monitoring import RunMonitor, serve_metrics
from fedattune.runs.context import Progress
from flower.harness import free_ports
from flower.runs import read_log, run_deployed


def get(port: int, path: str) -> tuple[int, str]:
    """The status and the body of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and label values -> value."""
    return {
        (sample.name, tuple(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_the_results(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, looks = free_ports(1), []
    record = RunMonitor.record_progress

    def record_and_look(self: RunMonitor, progress: Progress, absent: int, **options: Any) -> None:
        record(self, progress, absent, **options)
        looks.append((get(port, "/metrics"), get(port, "/healthz")))

    monkeypatch.setattr(RunMonitor, "record_progress", record_and_look)
    local, fedavg = run_deployed(ragged, tmp_path, algorithms="local,fedavg", rounds=3, metrics_port=port)
    (status, text), (health, facts) = looks[-1]
    assert (status, health) == (200, 200)
    samples = read_samples(text)
    for result in (local, fedavg):
        mine = (result.algorithm, "0")
        assert samples["fedattune_rounds_done", mine] == samples["fedattune_rounds_planned", mine] == 3
        assert samples["fedattune_accuracy", mine] == pytest.approx(result.metrics["acc_uniform"], abs=1e-6)
        assert samples["fedattune_sent_bytes_total", mine] == result.facts["wire"]["down"]
        assert samples["fedattune_received_bytes_total", mine] == result.facts["wire"]["up"]
        assert samples["fedattune_clients_without_reply", mine] == 0
        assert samples["fedattune_round_seconds", mine] > 0
    assert samples["fedattune_healthy", ()] == 1
    assert samples["fedattune_nodes_known", ()] == samples["fedattune_nodes_online", ()] == 3
    assert not any(value for (name, _), value in samples.items() if name == "fedattune_faults_total")
    assert ("fedattune_rmse", ("fedavg", "0")) not in samples
    got = json.loads(facts)
    assert (got["status"], got["method"], got["round"], got["rounds"]) == ("running", "fedavg", 3, 3)
    assert read_samples(looks[0][0][1])["fedattune_rounds_done", ("local", "0")] == 1
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")  # the run has ended


def test_a_port_that_is_taken_is_said_once_and_the_run_goes_on(ragged: Federation, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=2, metrics_port=port)
    assert result.is_finished
    assert sum(line.startswith(f"metrics-port: port {port} cannot be used") for line in read_log(tmp_path)) == 1


def test_a_run_without_nodes_or_progress_answers_503(tmp_path: Path) -> None:
    port, log = free_ports(1), []
    monitor = RunMonitor(DeploymentOptions(), tmp_path)
    with serve_metrics(monitor, port, log.append):
        status, text = get(port, "/healthz")
        assert status == 503
        assert json.loads(text)["reason"] == "no node is online; look at the logs of the nodes"
        monitor.record_online({7})
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/other") == (404, "expected /metrics or /healthz\n")
    assert not log


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost:"])
@pytest.mark.parametrize("end", ["idle", "reset"])
def test_a_client_that_asks_nothing_leaves_no_traceback(
    tmp_path: Path, sent: bytes, end: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port, log, handled = free_ports(1), [], threading.Event()
    monitor, handle = RunMonitor(DeploymentOptions(), tmp_path), ThreadingWSGIServer.process_request_thread

    def handle_and_tell(self: Any, *request: Any) -> None:
        handle(self, *request)
        handled.set()

    monkeypatch.setattr(ThreadingWSGIServer, "process_request_thread", handle_and_tell)
    monkeypatch.setattr(monitoring._QuietHandler, "timeout", 0.2)
    with serve_metrics(monitor, port, log.append), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(sent)
        if end == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        assert handled.wait(10)
    assert not log
    assert capfd.readouterr() == ("", "")


def known_names(folder: Path) -> set[str]:
    """Names of all metrics, as queries write them."""
    families = RunMonitor(DeploymentOptions(), folder).collect()
    return {one.name + ("_total" if one.type == "counter" else "") for one in families}


def used_names(query: str) -> set[str]:
    return set(re.findall(r"fedattune_\w+", query))


def write_monitoring(folder: Path, **config: Any) -> Path:
    write_kit(folder, config=config, nodes=[{}])
    return folder / "monitoring"


def test_the_dashboard_and_the_alerts_use_metrics_that_exist(tmp_path: Path) -> None:
    folder = write_monitoring(tmp_path / "kit")
    dashboard = json.loads((folder / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((folder / "alerts.yml").read_text())
    rules: list[Mapping[str, Any]] = [rule for group in alerts["groups"] for rule in group["rules"]]
    known = known_names(tmp_path)
    for query in [*queries, *(rule["expr"] for rule in rules)]:
        assert used_names(query), query
        assert used_names(query) <= known, query
        assert len(re.findall(r"\boffset\b", query)) == len(re.findall(r"[\w}\]] offset \d+[smhdwy]", query)), query
    assert used_names(" ".join(queries)) == known  # the dashboard leaves nothing out
    assert len(rules) == 4
