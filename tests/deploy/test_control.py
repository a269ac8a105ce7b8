"""Requests of the administrator: pause and abort."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from fedattune import Federation, RunError
from fedattune.analysis.monitor import read_statuses
from fedattune.deploy.server.control import CONTROL_FILE, ControlRequest, read_request, write_request
from flower.runs import read_log, run_deployed, run_simulated
from remote_runs import same_numbers


def ask_at(folder: Path, request: ControlRequest, after: int) -> Any:
    """Make the request when the server sends its message number `after`."""
    left = iter(range(after))

    def asks(*_: Message) -> bool:
        if next(left, None) is None and not (folder / CONTROL_FILE).exists():
            write_request(folder, request)
        return False

    return asks


@pytest.mark.parametrize("name", ["fedmcsa", "fedrep", "scaffold"])
def test_a_paused_run_continues_as_if_it_had_not_been(name: str, ragged: Federation, tmp_path: Path) -> None:
    lost = ask_at(tmp_path / "run", "pause", 4)
    assert run_deployed(ragged, tmp_path, algorithms=name, lost=lost) == []
    assert any("seed 0: stopped after round 1 of" in sentence for sentence in read_log(tmp_path))
    assert "./run.sh continues it" in read_log(tmp_path)[-1]
    assert read_request(tmp_path / "run") is None
    (status,) = read_statuses(tmp_path / "run")
    assert status.state == "stopped?"
    (result,) = run_deployed(ragged, tmp_path, algorithms=name)
    assert any("continuing after round 1" in sentence for sentence in read_log(tmp_path))
    same_numbers(run_simulated(name, ragged), result, measured=False)


def test_an_aborted_run_compares_what_had_finished(ragged: Federation, tmp_path: Path) -> None:
    def is_second(*_: Message) -> bool:
        if (tmp_path / "run/local/seed-0/result.json").exists():
            write_request(tmp_path / "run", "abort")
        return False

    (result,) = run_deployed(ragged, tmp_path, algorithms="local,fedavg", lost=is_second)
    assert result.algorithm == "local"
    assert (tmp_path / "run" / "result.json").exists()
    assert "the run is aborted; the results are of the methods that had finished" in read_log(tmp_path)
    with pytest.raises(RunError, match="was aborted; take a new run-folder"):
        run_deployed(ragged, tmp_path, algorithms="local,fedavg")
    write_request(tmp_path / "run", None)
    _, fedavg = run_deployed(ragged, tmp_path, algorithms="local,fedavg")
    same_numbers(run_simulated("fedavg", ragged), fedavg, measured=False)


def test_a_folder_without_a_run_and_a_damaged_request_are_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run of a federation"):
        write_request(tmp_path, "pause")
    (tmp_path / CONTROL_FILE).write_text('{"request": "stop"}')
    with pytest.raises(RunError, match="expected pause or abort"):
        read_request(tmp_path)
