"""The audit log of a node: every message in and out, and what its chain of hashes shows."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import Federation, RunError
from fedattune.experiments.deploy.audit import AuditLog, AuditLogError, count_bytes
from fedattune.training.backends.message import WorkerMessage
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
        {
            "name": "sent/params/w",
            "dtype": "float32",
            "shape": [2, 3],
            "sha256": hashlib.sha256(values).hexdigest(),
        }
    ]
    assert [left[key] for key in ("token", "algorithm", "seed", "round")] == [
        "0123456789abcdef",
        "fedavg",
        0,
        1,
    ]
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


def test_without_the_second_file_the_end_is_unknown(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.end_file.unlink()
    assert "audit-end.json is missing" in str(log.verify())


def test_a_crash_while_a_line_is_written_is_no_change(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    end = log.end_file.read_text()
    log.append("in", request(), HEAD)
    log.end_file.write_text(end)  # the line was on the disk, the second file was not
    with log.file.open("a") as file:
        file.write('{"number": 4, "ti')  # the next line was cut off
    log.append("out", reply(), HEAD)
    assert log.verify() is None
    assert [line["number"] for line in log.read()] == [1, 2, 3, 4]


def test_a_line_of_somebody_else_stops_the_log(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    with log.file.open("a") as file:
        file.write('{"number": 3, "before": "00"}\n')
    with pytest.raises(AuditLogError, match="line 3 was not written by the node"):
        log.append("in", request(), HEAD)


def test_several_writers_make_one_chain(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: filled(tmp_path, 5), range(4)))
    log = AuditLog(tmp_path)
    assert log.verify() is None
    assert len(log.read()) == 40


def test_there_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read the audit log"):
        AuditLog(tmp_path).verify()


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
        names |= {
            part for line in uploads for tensor in line["tensors"] for part in tensor["name"].split("/")
        }
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
