"""Runs in several processes: the same numbers, the same failures, the same ways to stop; nobody stays behind."""

import functools
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gated_worker import start_worker

from cli_helpers import SLOW, Done, numbers, refused, wait_for
from fedattune.experiments import pool, runner
from fedattune.experiments.plan import ProgressCallback
from fedattune.experiments.runner import ProgressDisplay
from fedattune.runs.context import Progress

Cli = Callable[..., Done]
FAST = ("--rounds", 3, "--steps", 3, "--clients", 5, "--out")
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


def parents() -> dict[int, int]:
    """Of every process, its parent."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """All processes that came from this one."""
    of = parents()
    found = {pid}
    while more := {child for child, parent in of.items() if parent in found} - found:
        found |= more
    return found - {pid}


def workers(pid: int) -> set[int]:
    """The processes that train: those that another one forked from."""
    of = parents()
    return {child for child in descendants(pid) if of.get(child) != pid}


def all_gone(pids: set[int]) -> bool:
    """Whether they all end, for which they have some seconds."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not pids & parents().keys():
            return True
        time.sleep(0.05)
    return False


def test_the_same_numbers_and_rows(cli: Cli, work: Path) -> None:
    line = ("compare", "--algorithms", "fedmcsa,local,fedavg", "--seeds", 2, *FAST)
    done = cli(*line, "one", "--processes", 1, "--quiet")
    assert done.code == 0, done.err
    done = cli(*line, "two", "--processes", 2)
    assert done.code == 0, done.err
    assert "training 6 runs in 2 processes, 1 thread each\n" in done.err
    assert "fedavg (seed 1): round 3 of 3" in done.err
    assert numbers(work / "one" / "result.json") == numbers(work / "two" / "result.json")
    for out in ("one", "two"):
        assert not list((work / out).glob(".*"))
    models = [(work / out / "fedavg" / "seed-1" / "models.safetensors").read_bytes() for out in ("one", "two")]
    assert models[0] == models[1]
    again = cli("compare", "--resume", "two", "--processes", 3, "--quiet")
    assert (again.code, again.err) == (0, "")


MODEL = """
import multiprocessing, os, warnings
from torch import nn
def make(shape, classes):
    if multiprocessing.parent_process() is not None:
        %s
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
"""


@pytest.fixture
def model(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """A model of one's own that does something where it is made in another process."""
    monkeypatch.syspath_prepend(str(work))

    def write(name: str, line: str) -> str:
        (work / f"{name}.py").write_text(MODEL % line)
        return f"{name}:make"

    return write


TWO = ("compare", "--algorithms", "local,fedavg", "--processes", 2, "--quiet", *FAST)


def test_faults_come_back_with_where_they_arose(cli: Cli, work: Path, model: Callable[[str, str], str]) -> None:
    done = cli(*TWO, "o", "--model", model("broken", "os.rmdir('/no/folder')"))
    assert done.code == 2
    assert "No such file or directory: '/no/folder'" in done.err
    done = cli(*TWO, "p", "--model", model("wrong", "1 / 0"))
    assert done.code != 0
    assert "by zero" in done.err


ODD = """
import multiprocessing
from torch import nn
class OddError(Exception):
    def __init__(self, where, why):
        super().__init__(f"{where}: {why}")
class Net(nn.Sequential):
    calls = 0
    def forward(self, x):
        Net.calls += multiprocessing.parent_process() is not None
        if Net.calls > 12:
            raise OddError("layer 1", "too hot")
        return super().forward(x)
def make(shape, classes):
    return Net(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
"""


def test_an_error_that_cannot_be_unpickled_keeps_its_text_and_its_traceback(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(work))
    (work / "odd.py").write_text(ODD)
    done = cli(*TWO, "o", "--model", "odd:make", "--engine", "sequential")
    assert done.code == 1
    assert "OddError: layer 1: too hot" in done.err
    assert "memory" not in done.err + done.out
    assert "in forward" in (work / "o" / "error.log").read_text()


ONCE = """try:
            os.close(os.open(os.path.dirname(__file__) + "/gone", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os._exit(3)"""


def test_a_new_process_takes_the_place_of_one_that_left(cli: Cli, work: Path, model: Callable[[str, str], str]) -> None:
    line = ("--processes", 2, "--quiet", "--model", model("once", ONCE))
    done = cli("compare", "--algorithms", "local,fedavg,fedprox,ditto", *line, *FAST, "o")
    assert done.code == 1, done.err
    assert done.out.count("the process that trained it ended with exit code 3") == 1
    assert len(list((work / "o").glob("*/seed-0/result.json"))) == 3


def test_warnings_come_back(cli: Cli, model: Callable[[str, str], str]) -> None:
    with pytest.warns(UserWarning, match="^look out$") as record:
        done = cli(*TWO, "o", "--model", model("warner", "warnings.warn('look out')"))
    assert done.code == 0, done.err
    assert record[0].filename.endswith("warner.py")


class At(ProgressDisplay):
    """Does something once, when all of some runs have reached a round."""

    def __init__(self, titles: set[str], round_: int, act: Callable[[], None]) -> None:
        self.titles, self.round, self.act, self.times = titles, round_, act, 0

    def add_run(self, title: str, rounds: int) -> ProgressCallback:
        def tell(progress: Progress) -> None:
            if progress.round == self.round and title in self.titles:
                self.titles.remove(title)
                if not self.titles:
                    self.times += 1
                    self.act()

        return tell


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., At]:
    def use(titles: set[str], round_: int, act: Callable[[], None]) -> At:
        watch = At(titles, round_, act)
        monkeypatch.setattr("fedattune.experiments.session.make_progress_display", lambda quiet: watch)
        return watch

    return use


@pytest.fixture
def both_at(at: Callable[..., At], monkeypatch: pytest.MonkeyPatch) -> Callable[..., At]:
    """Let both runs wait after a round: when something is done to them there, none of them is done or far behind."""

    def use(round_: int, act: Callable[[], None], gate: Any = None) -> At:
        monkeypatch.setattr(pool, "_start_worker", functools.partial(start_worker, round_, gate))
        return at({"local", "fedmcsa"}, round_, act)

    return use


def signal_workers(number: int, n: int | None = None) -> None:
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children[:n]:
        assert child.pid is not None
        os.kill(child.pid, number)


def test_a_killed_process(cli: Cli, work: Path, whole: Any, both_at: Callable[..., At]) -> None:
    gate = pool._get_context().Semaphore(0)

    def kill_one() -> None:
        signal_workers(signal.SIGKILL, 1)
        for _ in range(2):
            gate.release()

    watch = both_at(8, kill_one, gate)
    done = cli(*SLOW, "--out", "o", "--processes", 2)
    assert (done.code, watch.times) == (1, 1)
    assert done.out.count("the process that trained it was killed by SIGKILL") == 1
    assert "continue with --resume" in done.out
    done = cli("compare", "--resume", "o", "--processes", 1)
    assert done.code == 0, done.err
    assert numbers(work / "o" / "result.json") == whole


def test_interrupt_and_resume(cli: Cli, work: Path, whole: Any, both_at: Callable[..., At]) -> None:
    def interrupt() -> None:
        signal_workers(signal.SIGINT)  # a terminal tells all
        signal.raise_signal(signal.SIGINT)

    watch = both_at(8, interrupt)
    done = cli(*SLOW, "--out", "o", "--processes", 2)
    assert (done.code, watch.times) == (130, 1)
    assert done.err == "fedattune: stopped with 0 of 2 runs done; resume with: fedattune compare --resume o\n"
    assert not multiprocessing.active_children()
    assert not list((work / "o").glob(".*"))
    for name in ("local", "fedmcsa"):
        assert list((work / "o" / name / "seed-0" / "checkpoints").glob("*.safetensors"))
    done = cli("compare", "--resume", "o", "--processes", 2)
    assert done.code == 0, done.err
    assert numbers(work / "o" / "result.json") == whole


@linux
@pytest.mark.deployed
def test_nobody_stays_behind(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    running = start(*SLOW, "--rounds", 4000, "--steps", 200, "--out", "o", "--processes", 2)
    wait_for(running, "2 processes")
    end = time.monotonic() + 120
    while len(workers(running.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    here = descendants(running.pid)
    assert len(workers(running.pid)) == 2
    running.kill()
    running.communicate(timeout=60)
    assert all_gone(here)


@linux
def test_sigterm_to_all_processes_stops_and_says_how_to_resume(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    """As systemd and containers stop a service."""
    running = start(*SLOW, "--rounds", 4000, "--out", "o", "--processes", 2)
    wait_for(running, "2 processes")
    end = time.monotonic() + 120
    while len(workers(running.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    here = descendants(running.pid)
    for pid in (*here, running.pid):
        os.kill(pid, signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert err.endswith("stopped with 0 of 2 runs done; resume with: fedattune compare --resume o\n")
    assert "resource_tracker" not in err
    assert all_gone(here)


def test_auto_spreads_in_the_middle_of_a_run(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("compare", "--algorithms", "local,fedmcsa", "--clients", 5, "--rounds", 8, "--steps", 3, "--out")
    assert cli(*line, "one", "--processes", 1, "--quiet").code == 0
    monkeypatch.setattr(runner, "START_S", -1.0)
    monkeypatch.setattr(runner, "MIN_TIMED_S", 1e-9)
    monkeypatch.setattr(runner, "count_available_cores", lambda: 2)
    done = cli(*line, "two")
    assert done.code == 0, done.err
    assert "training 2 runs in 2 processes" in done.err
    assert numbers(work / "one" / "result.json") == numbers(work / "two" / "result.json")


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "1025", "true"])
def test_what_is_no_number_of_processes(cli: Cli, value: str) -> None:
    refused(
        cli("compare", *FAST, "o", f"--processes={value}"),
        "--processes: expected a number of processes from 1 to 1024, or auto, got",
    )
