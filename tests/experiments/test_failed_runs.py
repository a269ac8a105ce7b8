"""A method that diverges does not take the others' results with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Done
from fedattune.core.errors import DivergedError

Cli = Callable[..., Done]
FAST = ("--rounds", 2, "--steps", 3, "--clients", 5, "--quiet", "--out", "o")


@pytest.fixture
def diverge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the runs with these (algorithm, seed) diverge."""
    from fedattune.training import fit as trainer

    real = trainer.train_run

    def use(*runs: tuple[str, int]) -> None:
        def train_run(run: Any, **options: Any) -> Any:
            if (run.name, run.settings.seed) in runs:
                raise DivergedError("round 1: training diverged")
            return real(run, **options)

        monkeypatch.setattr("fedattune.training.fit.train_run", train_run)

    return use


def test_the_others_go_on(cli: Cli, work: Path) -> None:
    """With a real divergence, and again when resumed."""
    line = ("--algorithms", "local,fedprox,fedavg", "--model", "dnn", "--set", "fedprox.mu=1.0e+12")
    for again in (("compare", *line, *FAST, "--rounds", 12), ("compare", "--resume", "o", "--quiet")):
        done = cli(*again, "--json", "r.json")
        assert done.code == 1
        assert done.err == ""
        assert "note: fedprox failed with seed 0: " in done.out
        content = json.loads((work / "r.json").read_text())
        assert [run["algorithm"] for run in content["runs"]] == ["local", "fedavg"]
        assert content["verdict"] in done.out
        assert not content["verdict"].startswith("Nothing to compare")
        ((failed),) = content["failed"]
        assert (failed["algorithm"], failed["seed"]) == ("fedprox", 0)
        assert "diverged" in failed["error"]
        assert (work / "o" / "report.html").exists()


def test_one_seed_fails(cli: Cli, work: Path, diverge: Callable[..., None]) -> None:
    diverge(("fedavg", 1))
    done = cli("compare", "--algorithms", "local,fedavg", *FAST, "--seeds", 2)
    assert done.code == 1
    assert "note: fedavg failed with seed 1: round 1: training diverged" in done.out
    content = json.loads((work / "o" / "result.json").read_text())
    assert [row["n_seeds"] for row in content["table"]] == [2, 1, 1]


def test_a_single_run_that_fails(cli: Cli, work: Path, diverge: Callable[..., None]) -> None:
    diverge(("fedavg", 0))
    done = cli("run", "--algorithm", "fedavg", *FAST)
    assert (done.code, done.out) == (2, "")
    assert done.err == "fedattune: error: round 1: training diverged\n"
    assert not (work / "o" / "result.json").exists()
