"""A run that is interrupted or killed ends, resumed, with the numbers of one that was not."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import SLOW, Done, numbers, wait_for

Cli = Callable[..., Done]


def test_interrupt_and_resume(cli: Cli, start: Callable[..., "subprocess.Popen[str]"], work: Path, whole: Any) -> None:
    running = start(*SLOW, "--out", "o")
    wait_for(running, "fedmcsa: round 12 of 40")
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    last = err.splitlines()[-1]
    assert last.startswith("fedattune: stopped after round ")
    assert last.endswith(" of 40; resume with: fedattune compare --resume o")
    assert not (work / "o" / "result.json").exists()
    done = cli("compare", "--resume", "o", "--json", "r.json")
    assert done.code == 0, done.err
    second = numbers(work / "r.json")
    assert second == whole
    # resuming a finished run gives the same again, at once
    again = cli("compare", "--resume", "o", "--quiet")
    assert again.code == 0
    assert numbers(work / "o" / "result.json") == second
    # with another engine is allowed, by the other command is not
    other = cli("compare", "--resume", "o", "--quiet", "--engine", "sequential")
    assert other.code == 0
    assert "note: engine was auto and is sequential: results stay equal up to rounding, except" in other.out
    assert "engine was" not in again.out
    wrong = cli("run", "--resume", "o")
    assert wrong.code == 2
    assert "use fedattune compare --resume o" in wrong.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_between_two_methods(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from fedattune.training import fit as trainer

    real = trainer.train_run

    def fit(*args: Any, **options: Any) -> Any:
        done = real(*args, **options | {"callbacks": ()})
        signal.raise_signal(number)
        return done

    before = signal.getsignal(number)
    monkeypatch.setattr("fedattune.training.fit.train_run", fit)
    done = cli("compare", "--clients", 5, "--rounds", 2, "--out", "o", "--quiet")
    assert done.code == 130
    assert "stopped before fedavg; resume with: fedattune compare --resume o" in done.err
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("broken", ["changed", "missing", "text"])
def test_resume_with_other_data(cli: Cli, work: Path, broken: str) -> None:
    assert cli("run", "--rounds", 1, "--clients", 5, "--out", "o", "--quiet").code == 0
    path = work / "o" / "partition.json"
    if broken == "missing":
        path.unlink()
    else:
        path.write_text('{"hash": "0"}' if broken == "changed" else "{")
    done = cli("run", "--resume", "o")
    assert done.code == 2
    assert "start a new run" in done.err
