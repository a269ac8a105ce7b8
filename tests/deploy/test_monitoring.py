"""The state of a deployment while it runs: health, faults by kind, and the nodes for `fedattune watch`."""

import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from fedattune import Federation
from fedattune.analysis.monitor import read_nodes, read_statuses
from fedattune.deploy.config import DeploymentOptions
from fedattune.deploy.server import monitoring
from fedattune.deploy.server.monitoring import RunMonitor
from fedattune.runs.context import Progress
from flower.in_process import InProcessGrid
from flower.runs import run_deployed


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunMonitor, list[Any]]]:
    """The monitor of each run, with the snapshots and files after each round."""
    monitors: list[tuple[RunMonitor, list[Any]]] = []
    record = RunMonitor.record_progress

    def record_and_look(self: RunMonitor, progress: Progress, absent: int, **options: Any) -> None:
        record(self, progress, absent, **options)
        if not monitors or monitors[-1][0] is not self:
            monitors.append((self, []))
        now = SimpleNamespace(names=self._names, faults=dict(self._faults), runs=deepcopy(self._runs))
        nodes, statuses = read_nodes(self._folder), read_statuses(self._folder)
        monitors[-1][1].append((now, nodes, statuses))

    monkeypatch.setattr(RunMonitor, "record_progress", record_and_look)
    return monitors


def test_faults_are_counted_by_node_and_kind(ragged: Federation, tmp_path: Path, seen: Any) -> None:
    class Faulty(InProcessGrid):
        """Node 100 fails, node 101 is late and node 102 is offline, each in one round."""

        def get_node_ids(self) -> list[int]:
            away = seen and seen[-1][1][-1][0].runs["fedavg", 0].done == 2
            return [number for number in self.contexts if number != 102 or not away]

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            for message in messages:
                is_failing = message.metadata.group_id == "2" and message.metadata.dst_node_id == 100
                data = self.contexts[message.metadata.dst_node_id].node_config
                data["data"] = str(data["data"]).removesuffix("-gone") + "-gone" * is_failing
            return super().push_messages(messages)

    def lose(node: int, message: Message) -> bool:
        return node == 101 and message.metadata.group_id == "1"

    run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=4, eval_every=4, cohort=6, lost=lose, make_grid=Faulty)
    ((_, looks),) = seen
    names = [node.name for node in looks[0][1]]
    last = looks[-1][0]
    got = {(last.names[i], kind): n for (i, kind), n in last.faults.items()}
    assert got == {("node-0", "failed"): 1, ("node-1", "late"): 1, ("node-2", "offline"): 1}
    assert sorted(names) == ["node-0", "node-1", "node-2"]
    faults = [{node.name: node.fault for node in nodes if node.fault} for _, nodes, _ in looks]
    assert faults == [{"node-1": "late"}, {"node-0": "failed"}, {"node-2": "offline"}, {}]
    assert [[node.name for node in nodes if not node.is_online] for _, nodes, _ in looks][2] == ["node-2"]
    assert [now.runs["fedavg", 0].absent for now, _, _ in looks] == [3, 2, 1, 0]
    assert not read_nodes(tmp_path / "run")  # the server has ended


def make_monitor(folder: Path) -> RunMonitor:
    return RunMonitor(DeploymentOptions(start_timeout=600, round_timeout=10), folder)


def test_health_names_a_run_without_progress_or_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, now = make_monitor(tmp_path), time.monotonic()
    is_healthy, facts = monitor.describe_health()
    assert not is_healthy
    assert (facts["status"], facts["reason"]) == ("stalled", "no node is online; look at the logs of the nodes")
    monitor.record_online({7})
    assert monitor.describe_health() == (
        True,
        {
            "status": "waiting",
            "method": None,
            "seed": None,
            "round": None,
            "rounds": None,
            "seconds_since_progress": pytest.approx(0, abs=5),
            "nodes_online": 1,
            "nodes_known": 0,
        },
    )
    monitor.begin_run("fedavg", 3, done=0, planned=9)
    monitor.record_progress(Progress(2, 9, 0.5, 1.0), absent=0)
    is_healthy, facts = monitor.describe_health()
    assert is_healthy
    assert [facts[key] for key in ("status", "method", "seed", "round", "rounds")] == ["running", "fedavg", 3, 2, 9]
    # A round's messages may take 10 seconds, so 3 times as long is a stall.
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now + 25)
    assert monitor.describe_health()[0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now + 60)
    is_healthy, facts = monitor.describe_health()
    assert not is_healthy
    assert "expected one in 30 s" in facts["reason"]
