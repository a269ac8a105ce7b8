"""Log lines: today's sentences, or JSON with the known fields and without data."""

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import Federation, RunError
from fedattune.deploy.logs import make_server_log, open_log
from fedattune.deploy.node.files import report_error
from fedattune.deploy.node.node import NodeRuntime
from fedattune.training.backends.message import WorkerMessage
from flower.runs import run_deployed


@pytest.fixture(autouse=True)
def forget_formats() -> Iterator[None]:
    """Loggers outlive a test."""
    yield
    for program in ("server", "node"):
        logging.getLogger(f"fedattune.{program}").handlers = []


@pytest.mark.parametrize(
    ("sentence", "level"),
    [
        ("round 3: node 'a' was offline", "warning"),
        ("left out of the federation: a node went offline", "warning"),
        ("node 'a' does not belong to this federation: its clients differ", "warning"),
        ("fedavg, seed 0: round 3 of 5, accuracy 50.0", "info"),
        ("The report is report.html", "info"),
    ],
)
def test_a_json_line_has_time_level_event_and_fields(
    sentence: str, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_server_log("json", lambda text: {"round": 3, "node": None, "length": len(text)})(sentence)
    line = json.loads(capsys.readouterr().out)
    time = datetime.fromisoformat(line.pop("time"))
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    assert line == {"level": level, "event": sentence, "round": 3, "length": len(sentence)}


def test_a_nodes_json_names_the_node_and_leaves_data_to_the_error_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log("node", "json", node="north")
    head = {"kind": "train", "token": "abcd", "algorithm": "fedavg", "seed": 1, "round": 4}
    report_error(tmp_path, RunError("row 7: 'Mary' is no number"), head)
    line = json.loads(capsys.readouterr().out)
    assert line.pop("time")
    assert line == {
        "level": "error",
        "event": "the node could not answer (RunError); its error.log says why",
        "node": "north",
        "run": "abcd",
        "method": "fedavg",
        "seed": 1,
        "round": 4,
    }
    assert "Mary" in (tmp_path / "error.log").read_text()


def test_the_format_of_a_node_is_in_its_configuration_or_its_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"name": "north", "data": "missing.csv", "state": str(tmp_path / "state")}

    def read_line(**more: str) -> str:
        NodeRuntime(config | more, {}).answer(WorkerMessage({"kind": "hello"}))
        return capsys.readouterr().out

    assert read_line().startswith("fedattune: ")
    monkeypatch.setenv("FEDATTUNE_LOG_FORMAT", "json")
    assert json.loads(read_line())["node"] == "north"
    assert read_line(**{"log-format": "text"}).startswith("fedattune: ")
    assert "log-format" in read_line(**{"log-format": "xml"})


def test_the_error_that_ends_a_run_is_a_line_of_json(
    ragged: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="got answers of 2 nodes"):
        run_deployed(ragged, tmp_path, lost=lambda node, _: node == 101, algorithms="fedavg", log_format="json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["level"] == "error"
    assert last["event"].startswith("got answers of 2 nodes, expected 3")


def test_a_run_in_json_prints_nothing_else(
    ragged: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_deployed(
        ragged,
        tmp_path,
        lost=lambda node, message: node == 101 and message.metadata.group_id == "2",
        algorithms="fedavg",
        log_format="json",
        rounds=3,
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    server = [line for line in lines if "could not answer" not in line["event"]]
    token = json.loads((tmp_path / "run" / "federation.json").read_text())["token"]
    late = [line for line in server if line["level"] == "warning"]
    assert late
    expected = {"run": token, "method": "fedavg", "seed": 0, "round": 2, "node": "node-1"}
    assert [line for line in late if not expected.items() <= line.items()] == []
