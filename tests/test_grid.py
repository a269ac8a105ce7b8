"""The grid of federations: its scores by hand, its search, what it stores, and its cells."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import grid, grid_cells, grid_scores
from benchmarks.__main__ import main

import fedattune

SEEDS = (0, 1)


def make_run(method: str, seed: int, accuracies: list[float] | None, lr: float = 0.02, **more: Any) -> dict:
    """Make a stored run whose validation accuracy is its test accuracy; without accuracies, training diverged."""
    mean = None if accuracies is None else float(np.mean(accuracies))
    return {
        "cell": "one",
        "kind": "iid",
        "method": method,
        "lr": lr,
        "seed": seed,
        "validation_accuracy": mean,
        "validation_loss": 1.0,
        "accuracy": mean,
        "accuracies": accuracies,
        "clients": accuracies and ["a", "b"],
        "seconds": 0.1,
        "error": grid_scores.DIVERGED if accuracies is None else None,
    } | more


RUNS = [
    make_run("local", 0, [0.80, 0.90]),
    make_run("local", 1, [0.70, 0.80]),
    make_run("fedavg_ft", 0, [0.70, 0.70], lr=0.02),
    make_run("fedavg_ft", 0, [0.90, 0.90], lr=0.2),
    make_run("fedavg_ft", 1, [0.78, 0.90], lr=0.2),
    make_run("ditto", 0, [0.795, 0.885]),
    make_run("ditto", 1, None),
    make_run("variant", 0, [1.0, 1.0]),
    make_run("variant", 1, [1.0, 1.0]),
    make_run("unfinished", 0, [1.0, 1.0]),
    make_run("useless", 0, None, error="useless needs a head"),
]
RIVALS = ("local", "fedavg_ft", "ditto")


def test_scores_of_methods_are_those_worked_out_by_hand() -> None:
    other = [run | {"cell": "two", "accuracy": 0.85} for run in RUNS if run["method"] in ("local", "ditto")]
    scores = grid_scores.score_cells([*RUNS, *other], SEEDS)
    found = grid_scores.score_methods(scores, RIVALS)
    # A variant is no rival: it is 13 points better than the best method, fedavg_ft.
    assert list(found) == ["variant", "fedavg_ft", "local", "ditto"]
    assert found["variant"].mean_regret == pytest.approx(-13)
    assert (found["local"].cells, found["local"].near, found["local"].worst_cell) == (2, 0.5, "one")
    assert found["local"].mean_regret == pytest.approx(7 / 2)
    assert found["local"].shortfall == pytest.approx(7)  # on the cell that has fedavg_ft too
    assert found["ditto"].worst_regret == pytest.approx(87 - 42)
    assert found["ditto"].harmed == 6 / 8


def test_the_search_tries_all_rates_and_then_the_best_on_the_other_seeds() -> None:
    """Equal validation accuracies go to the smaller loss."""
    runs: list[dict] = []
    losses = {0.02: 0.5, 0.06: 0.3, 0.2: 0.4}
    steps = []
    while (step := grid.find_next(runs, (0, 1, 2))) is not None:
        steps.append(step)
        runs.append(make_run("ditto", step[1], [0.5, 0.5], lr=step[0], validation_loss=losses[step[0]]))
    assert steps == [(0.02, 0), (0.06, 0), (0.2, 0), (0.06, 1), (0.06, 2)]
    assert grid.find_next([make_run("ditto", 0, None, error="no head")], (0, 1)) is None
    assert grid.find_next([make_run("ditto", 0, None, lr=rate) for rate in grid.RATES], (0, 1)) is None


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two rounds of one cell in this process: to start another takes seconds."""
    settings = {"rounds": 2, "epochs": 1, "train": "cohort"}
    monkeypatch.setattr(grid_cells.Cell, "settings", property(lambda cell: settings))

    def run_here(units: Any, out: Path, processes: int) -> int:
        for unit in units:
            grid.store_runs(out, unit.cell, grid.train_unit(unit))
        return 0

    monkeypatch.setattr(grid, "run_units", run_here)


CALL = ["grid", "--cells", "digits-rotated-10", "--seeds", "0,1", "--algorithms"]


def test_a_second_command_adds_what_is_missing_and_repeats_nothing(
    tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # As after a command that was stopped: the second rate is stored, with a time that no run takes.
    stopped = make_run("local", 0, [0.1, 0.1], lr=0.06, cell="digits-rotated-10", kind="groups", seconds=1e6)
    grid.store_runs(tmp_path, "digits-rotated-10", [stopped])
    assert main([*CALL, "local", "--out", str(tmp_path)]) == 0
    first = grid.read_runs(tmp_path, "digits-rotated-10")
    assert sorted((run["lr"], run["seed"]) for run in first if run["seed"] == 0) == [(rate, 0) for rate in grid.RATES]
    assert len(first) == 4
    assert 1e6 in {run["seconds"] for run in first}
    assert main([*CALL, "fedavg,local", "--out", str(tmp_path)]) == 0
    second = grid.read_runs(tmp_path, "digits-rotated-10")
    assert second[:4] == first
    assert {run["method"] for run in second[4:]} == {"fedavg"}
    assert {run["error"] for run in second} == {None}
    run = second[-1]
    assert run["accuracy"] == pytest.approx(np.mean(run["accuracies"]), abs=1e-4)  # they are rounded
    variant = ["--variant", "still=ditto:lam=0.5", "--force", "local"]
    assert main([*CALL[:-1], *variant, "--out", str(tmp_path)]) == 0
    assert {run["method"] for run in grid.read_runs(tmp_path, "digits-rotated-10")} == {"fedavg", "still"}
    assert {file.name for file in tmp_path.iterdir()} >= {"table.md", "cells.md", "heatmap.png"}
    capsys.readouterr()
    assert main([*CALL, "fedavg", "--show", "--out", str(tmp_path)]) == 0
    assert "still" not in capsys.readouterr().out


def test_groups_have_what_they_are_named_after() -> None:
    whole = fedattune.load_federation("digits", partition="iid", clients=8, seed=0)
    rows = [torch.as_tensor(client.all) for client in whole.clients]
    turned, permuted = grid_cells.rotate_groups(whole, 4, 0), grid_cells.permute_groups(whole, 3, 0)
    plain = whole.features(torch.arange(len(whole.y)))
    for u, mine in enumerate(rows):
        assert torch.equal(torch.rot90(turned.x[mine], -(u % 4), (-2, -1)), plain[mine])
        pairs = set(zip(whole.y[mine].tolist(), permuted.y[mine].tolist(), strict=True))
        assert len(pairs) == 10  # each class has one new meaning
        assert torch.equal(permuted.y[mine], whole.y[mine]) == (u % 3 == 0)
    shifted = grid_cells.shift_features(whole, 0, 0)
    means = [float(shifted.x[mine].mean()) for mine in rows]
    assert np.std(means) > 10 * np.std([float(plain[mine].mean()) for mine in rows])
