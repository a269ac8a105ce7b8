"""The audit log of a node: every message in and out, and what its chain of hashes shows."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import ConfigRecord, MessageType

from fedattune import Federation, RunError
from fedattune.core.io import write_text
from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.deploy.node.client_app import make_client_app
from fedattune.deploy.operate import audit
from fedattune.deploy.operate.audit import AuditLog, AuditLogError, count_bytes
from fedattune.training.backends.message import WorkerMessage
from flower.in_process import InProcessGrid
from flower.runs import run_deployed

HEAD: dict[str, Any] = {
    "kind": "train",
    "token": "0123456789abcdef",
    "algorithm": "fedavg",
    "seed": 0,
    "round": 1,
    "clients": {"ward a": 0},
}


def request() -> WorkerMessage:
    return WorkerMessage(dict(HEAD), {"sent/params/w": torch.arange(6.0).reshape(2, 3)})


def reply() -> WorkerMessage:
    return WorkerMessage({"kind": "trained", "n_trained": 1, "scores": [["trained", "test", [0]]]})


def filled(folder: Path, rounds: int = 3) -> AuditLog:
    log = AuditLog(folder)
    for _ in range(rounds):
        log.append("in", request(), HEAD)
        log.append("out", reply(), HEAD)
    return log


def edit(log: AuditLog, number: int, old: str, new: str) -> None:
    lines = log.file.read_text().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    log.file.write_text("".join(lines))


def test_a_line_says_what_came_and_what_left(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    came, left = log.read()
    assert log.verify() is None
    assert (came["direction"], left["direction"]) == ("in", "out")
    assert came["clients"] == left["clients"] == ["ward a"]
    assert came["bytes"] == count_bytes(request()) == 24 + len(json.dumps(HEAD))
    values = torch.arange(6.0).numpy().tobytes()
    assert came["tensors"] == [
        {"name": "sent/params/w", "dtype": "float32", "shape": [2, 3], "sha256": hashlib.sha256(values).hexdigest()}
    ]
    assert [left[key] for key in ("token", "algorithm", "seed", "round")] == ["0123456789abcdef", "fedavg", 0, 1]
    assert left["head"] == {"n_trained": 1, "scores": [["trained", "test", [0]]]}
    assert left["time"].endswith("+00:00")
    assert "learned" in left["purpose"]


@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_edited_line_shows(number: int, tmp_path: Path) -> None:
    log = filled(tmp_path)
    edit(log, number, '"seed": 0', '"seed": 7')
    assert f"line {number} was changed" in str(log.verify())


def test_a_removed_line_and_a_cut_end_show(tmp_path: Path) -> None:
    log = filled(tmp_path)
    whole = log.file.read_text().splitlines(keepends=True)
    log.file.write_text("".join(whole[:2] + whole[3:]))
    assert "line 2 was changed, or lines before line 3 were removed" in str(log.verify())
    log.file.write_text("".join(whole[:4]))
    assert log.verify() == "lines 5 to 6 were cut off the end"
    with pytest.raises(AuditLogError, match="lines were cut off"):
        log.append("in", request(), HEAD)
    log.file.write_text("".join(whole)[:-20])
    assert "line 6 is damaged" in str(log.verify())


@pytest.mark.parametrize("n_bytes", [0, 20, -1, None])
def test_a_crash_while_a_line_is_written_is_no_change(
    n_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 1)
    whole, ends = log.file.read_bytes(), list[str]()

    def record(file: Path, text: str) -> None:
        ends.append(text)
        write_text(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(audit, "write_text", record)
        log.append("in", request(), HEAD)
    line = log.file.read_bytes()[len(whole) :]
    log.end_file.write_text(ends[0])  # the end of the log before the line, as it was while the line was written
    log.file.write_bytes(whole + line[:n_bytes])
    assert log.verify() is None
    log.append("out", reply(), HEAD)
    assert log.verify() is None
    assert len(log.read()) == (4 if n_bytes is None else 3)


def forge(log: AuditLog, n: int) -> None:
    """Add lines that fit the chain, without a change to the second file."""
    for _ in range(n):
        lines = log.file.read_bytes().splitlines(keepends=True)
        entry = json.loads(lines[-1]) | {"number": len(lines) + 1}
        entry["before"] = hashlib.sha256(lines[-1]).hexdigest()
        log.file.write_bytes(b"".join(lines) + json.dumps(entry).encode() + b"\n")


@pytest.mark.parametrize("n", [1, 4])
def test_lines_of_somebody_else_stop_the_log(n: int, tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    forge(log, n)
    assert log.verify() == "line 3 was not written by the node: audit-end.json knows 2 lines"
    for _ in range(2):
        with pytest.raises(AuditLogError, match="line 3 was not written by the node"):
            log.append("in", request(), HEAD)
    assert "line 3 was not written" in str(log.verify())


@pytest.mark.parametrize("text", ["x", "[]", '{"lines": -1, "bytes": 0, "sha256": ""}', "[" * 100_000])
def test_a_damaged_second_file(text: str, tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    log.end_file.write_text(text)
    assert "audit-end.json is damaged" in str(log.verify())
    with pytest.raises(AuditLogError, match="is damaged; keep both"):
        log.append("in", request(), HEAD)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: list[dict[str, Any]] = [
    {},
    {"kind": "several", "parts": 5, "clients": 5},
    {"kind": "several", "parts": ["x", None, {"kind": ["y"]}], "clients": [{}, 3, None, {"name": {}}]},
    {"kind": {"a": []}, "token": [1], "algorithm": {}, "round": "\x1b[2J", "clients": {"a": 1}},
    {"kind": "train", "seed": nested(100_000), "names": nested(100_000)},
]


@pytest.mark.parametrize("head", ODD)
def test_odd_messages_are_logged_too(head: dict[str, Any], tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append("in", WorkerMessage(head), head)
    log.append("out", WorkerMessage({"kind": "failed", "error": "KeyError"}), head)
    assert log.verify() is None
    assert [line["direction"] for line in log.read()] == ["in", "out"]


def test_the_server_cannot_fill_the_disk(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    head: dict[str, Any] = dict.fromkeys(("kind", "token", "algorithm", "seed", "round", long), long)
    head |= {str(i): 0 for i in range(100_000)}
    head |= {"clients": [long] * 3 + list(range(100_000)), "parts": [{"kind": str(i)} for i in range(100_000)]}
    log = AuditLog(tmp_path)
    log.append("in", WorkerMessage(head, {long: torch.ones(1)}), head)
    log.append("out", WorkerMessage({"kind": "failed"}), head)
    came, left = log.read()
    assert log.file.stat().st_size < 50_000
    assert came["token"] == left["token"] == "x" * 200 + "... (1,000,000 characters)"
    assert came["clients"][-1] == left["clients"][-1] == "... and 99,003 more"
    assert came["head"][-1].startswith("... and ")
    assert came["bytes"] > 1_000_000


@pytest.mark.parametrize(("is_changed", "kind"), [(False, "MessageFormatError"), (True, "AuditLogError")])
def test_a_message_that_cannot_be_read_is_logged(is_changed: bool, kind: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    if is_changed:
        filled(state, 1).end_file.unlink()
    grid = InProcessGrid(make_client_app(), [{"data": "x.csv", "state": str(state)}], {})
    record = pack_record(request())
    record["head"] = ConfigRecord({"version": 9, "json": str(record["head"]["json"])})
    message = grid.create_message(record, MessageType.TRAIN, 100, "1")
    (id_,) = grid.push_messages([message])
    (answer,) = grid.pull_messages([id_])
    assert unpack_record(answer.content).head == {"kind": "failed", "error": kind}
    assert "its message has version 9 of the format" in (state / "error.log").read_text()
    if is_changed:
        assert "audit-end.json is missing" in (state / "error.log").read_text()
        return
    log = AuditLog(state)
    assert log.verify() is None
    came, left = log.read()
    assert (came["direction"], came["kind"], left["direction"], left["kind"]) == ("in", "unreadable", "out", "failed")
    assert came["bytes"] > 24
    assert "cannot read" in came["purpose"]
    assert left["head"] == {"error": kind}


TRAINED = {("out", "trained"), ("out", "several")}


def test_a_run_logs_every_message(ragged: Federation, tmp_path: Path) -> None:
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=2)
    logs = [AuditLog(folder) for folder in sorted(tmp_path.glob("state-*"))]
    assert len(logs) == 3
    sent, names = 0, set[str]()
    for log in logs:
        assert log.verify() is None
        lines = log.read()
        kinds = [(line["direction"], line["kind"]) for line in lines]
        assert kinds[:2] == [("in", "hello"), ("out", "hello")]
        assert [one for one, _ in kinds] == ["in", "out"] * (len(lines) // 2)
        assert all("no sentence" not in line["purpose"] for line in lines)
        # The second training came with the evaluation of the first.
        uploads = [line for line in lines if (line["direction"], line["kind"]) in TRAINED]
        assert [line["round"] for line in uploads] == [1, 2]
        names |= {part for line in uploads for tensor in line["tensors"] for part in tensor["name"].split("/")}
        hello = lines[1]
        assert [one["name"] for one in hello["head"]["clients"]] == hello["clients"]
        assert "classes" in hello["head"]["schema"]
        sent += len(uploads)
    assert sent == 6
    assert {"upload", "scores"} <= names
    assert result.metrics


def test_a_changed_log_stops_the_node(ragged: Federation, tmp_path: Path) -> None:
    run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=1)
    AuditLog(tmp_path / "state-1").file.write_text("")
    with pytest.raises(RunError, match=r"got answers of 2 nodes.*AuditLogError"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=1, run_folder=str(tmp_path / "other"))
    assert "lines were cut off" in (tmp_path / "state-1" / "error.log").read_text()
