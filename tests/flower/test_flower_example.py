"""The Flower project in the examples, as it is and after each patch, in one process and in Flower's own runtime."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from flower.in_process import InProcessGrid

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower_app"
PAGE = ROOT / "docs" / "tutorials" / "flower.md"
N_NODES = 5


def read_changes(name: str) -> tuple[list[str], list[str]]:
    """Return the lines that a patch adds and takes away."""
    lines = (APP / f"{name}.patch").read_text("utf-8").splitlines()
    added, gone = ([line[1:] for line in lines if re.match(rf"\{sign}(?!\{sign}\{sign})", line)] for sign in "+-")
    return added, gone


def test_the_change_is_short_and_the_page_shows_it() -> None:
    page = PAGE.read_text("utf-8")
    added, gone = read_changes("fedmcsa")
    assert len(added) == len(gone) == 2
    assert f"```diff\n{(APP / 'fedmcsa.patch').read_text('utf-8')}```" in page
    added, _ = read_changes("attune")
    assert len(added) < 10
    assert all(line.strip() in page for line in added if "flower." in line)


def copy_app(folder: Path, patch: str | None) -> Path:
    shutil.copytree(APP, folder / "app")
    if patch:
        subprocess.run(["git", "apply", f"{patch}.patch"], cwd=folder / "app", check=True)
    return folder / "app"


@pytest.fixture
def app_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of an app are those of one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    logging.getLogger("flwr").setLevel(logging.ERROR)
    yield
    logging.getLogger("flwr").setLevel(logging.INFO)
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits_app"]:
        del sys.modules[name]


@pytest.mark.usefixtures("app_modules")
@pytest.mark.parametrize(("patch", "rounds", "least"), [(None, 2, 0.0), ("fedmcsa", 2, 0.85), ("attune", 2, 0.55)])
def test_nodes_of_few_classes_gain_by_the_change(
    patch: str | None, rounds: int, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model for all is not better than some of the nodes' classes; their own models are."""
    folder = copy_app(tmp_path, patch)
    sys.path.insert(0, str(folder))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    server, client, strategy = (
        import_module("digits_app.server_app"),
        import_module("digits_app.client_app"),
        import_module("flwr.serverapp.strategy"),
    )
    accuracies: list[float] = []
    aggregate = strategy.FedAvg.aggregate_evaluate

    def keep(self, server_round, replies):  # type: ignore[no-untyped-def]
        metrics = aggregate(self, server_round, replies)
        accuracies.append(metrics["eval_acc"])
        return metrics

    monkeypatch.setattr(strategy.FedAvg, "aggregate_evaluate", keep)
    config = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"] | {
        "num-server-rounds": rounds
    }
    grid = InProcessGrid(client.app, [{"partition-id": i, "num-partitions": N_NODES} for i in range(N_NODES)], config)
    server.app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    assert len(accuracies) == rounds
    assert accuracies[-1] > least
    assert patch or accuracies[-1] < 0.6
    assert (tmp_path / "final_model.pt").exists()


def test_the_change_runs_in_the_simulation_runtime_of_flower(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = copy_app(tmp_path, "fedmcsa")
    settings = folder / "pyproject.toml"
    settings.write_text(settings.read_text("utf-8").replace("num-server-rounds = 3", "num-server-rounds = 2"), "utf-8")
    script = Path(__file__).with_name("simulate.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), "3"],
        cwd=tmp_path,
        env=os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "Method: fedmcsa" in log
    assert log.count("Received 3 results and 0 failures") == 2, log
    accuracies = [float(value) for value in re.findall(r"'eval_acc': ([\d.]+)", log)]
    assert accuracies[-1] > 0.5
    assert (tmp_path / "final_model.pt").exists()
