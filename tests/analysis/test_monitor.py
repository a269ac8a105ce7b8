"""The status of runs that wait, train, were stopped, failed or finished."""

import os
import time
from pathlib import Path

import pytest

from crafted import BETTER, HALF, craft, experiment, finish_comparison, going
from fedattune.analysis.monitor import RunStatus, read_statuses
from fedattune.runs.store import RoundRecord, RunStore


def shown(folder: Path) -> dict[str, RunStatus]:
    return {line.method: line for line in read_statuses(folder)}


def test_what_is_seen_of_a_running_one_beside_local(tmp_path: Path) -> None:
    out = experiment(tmp_path / "out", "local, fedavg, ditto")
    craft(out, "local", HALF | {10: (1, 2, 3, 4)}, rounds=10)
    going(out, "fedavg", BETTER)
    lines = shown(out)
    assert [line.state for line in lines.values()] == ["finished", "running", "waiting"]
    run = lines["fedavg"]
    assert (run.round, run.rounds, run.bytes, run.seconds) == (2, 10, 2_000, 4.0)
    assert run.mean == pytest.approx((0.9 + 0.6 + 0.5 + 0.5) / 4)
    assert run.worst10 == 0.5
    assert run.gain == pytest.approx(0.1)  # to local in round 2, not in its last one
    assert run.seconds_left == pytest.approx(16.0)
    assert lines["local"].gain is None
    assert lines["local"].seconds_left is None


def test_only_new_rounds_are_read_and_a_run_that_was_taken_back_is_read_again(tmp_path: Path) -> None:
    out = experiment(tmp_path / "out")
    going(out, "fedavg", {1: (5, 10, 5, 20), 2: (5, 12, 5, 20)})
    assert read_statuses(out)[1].round == 2
    store = RunStore(out / "fedavg" / "seed-0" / "metrics.sqlite")
    store.add_round(RoundRecord(3, 9.0, 1_700, 1_800, 60, [1], [0, 2]))
    store.commit()
    line = read_statuses(out)[1]
    assert (line.round, line.seconds, line.bytes, line.diverged, line.absent) == (3, 9.0, 3_500, 1, 2)
    assert line.mean == pytest.approx(0.525)  # round 3 was not evaluated
    store.forget_after(1)
    line = read_statuses(out)[1]
    assert (line.round, line.diverged, line.absent) == (1, 0, 0)
    assert line.mean == pytest.approx(0.5)
    assert read_statuses(out)[1] == line or read_statuses(out)[1].quiet > line.quiet
    store.close()


def test_without_anything_new_for_long_it_may_have_been_stopped(tmp_path: Path) -> None:
    out = going(experiment(tmp_path / "out"), "fedavg", BETTER)
    folder = out / "fedavg" / "seed-0"

    def age(seconds: float) -> None:
        for file in folder.iterdir():
            os.utime(file, (time.time() - seconds,) * 2)

    age(50)
    assert shown(out)["fedavg"].state == "running"
    age(100)
    assert shown(out)["fedavg"].state == "stopped?"
    (folder / "metrics.sqlite").unlink()  # in its first round, which may take long
    age(300)
    assert shown(out)["fedavg"].state == "running"


def test_a_failed_run_is_failed_until_it_goes_on(tmp_path: Path) -> None:
    out = going(experiment(tmp_path / "out"), "fedavg", BETTER)
    craft(out, "local", HALF, rounds=2)
    failed = [{"algorithm": "fedavg", "seed": 0, "error": "it diverged"}]
    finish_comparison(out, failed)
    line = shown(out)["fedavg"]
    assert (line.state, line.failure) == ("failed", "fedavg failed with seed 0: it diverged")
    before = time.time() - 20
    os.utime(out / "result.json", (before, before))
    assert shown(out)["fedavg"].state == "running"
