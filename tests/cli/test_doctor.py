"""`fedattune doctor`: what is there, what is missing, and what to do."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli_helpers import Done, environment
from fedattune.core import measured
from fedattune.core.checks import Finding
from fedattune.experiments.doctor import EXTRAS, examine

Cli = Callable[..., Done]
ROOT = Path(__file__).parents[2]


def test_this_installation_works(cli: Cli, work: Path) -> None:
    done = cli("doctor", "--json", "d.json")
    assert (done.code, done.err) == (0, "")
    assert done.out.rstrip().endswith("FedAttune works here.")
    content = json.loads(Path("d.json").read_text())
    assert content["works"]
    names = [one["name"] for one in content["findings"]]
    assert {"version", "packages", "PyTorch", "cores", "memory", "disk", "cache folder", "training"} <= set(names)
    assert {f"extra {extra}" for extra in EXTRAS} <= set(names)


def test_each_extra_is_examined_with_all_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, (_, *packages) in EXTRAS.items():
        assert set(packages) == {re.split(r"[<>=]", one)[0] for one in project["optional-dependencies"][extra]}
    assert "alembic" in EXTRAS["mlflow"], "MLflow imports it for its SQL store, and mlflow-skinny does not install it"


def test_what_is_missing_has_a_command(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    def find(name: str) -> str:
        if name in ("matplotlib", "ray", "safetensors"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", find)
    found = {one.name: one for one in examine(quick=True)}
    assert (found["extra plot"].state, found["extra plot"].advice) == ("note", "pip install 'fedattune[plot]'")
    assert found["extra ray"].advice == "pip install 'fedattune[ray]'"
    assert (found["packages"].state, found["packages"].advice) == ("broken", "pip install safetensors")


def test_broken_folders_and_a_failing_run_give_exit_code_1(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "file").touch()
    monkeypatch.setenv("FEDATTUNE_HOME", str(work / "file" / "home"))
    monkeypatch.setenv("FEDATTUNE_DATA", str(work / "nowhere"))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr("fedattune.training.fit.fit", fail)
    monkeypatch.setenv("COLUMNS", "300")
    done = cli("doctor")
    assert done.code == 1
    assert "set FEDATTUNE_HOME to a folder that can be written to" in done.out
    assert "correct FEDATTUNE_DATA, or unset it" in done.out
    assert "training: RuntimeError: illegal instruction" in done.out
    assert "3 broken: cache folder, data folder, training" in done.out


def test_it_works_where_pytorch_does_not(work: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from fedattune.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment() | {"COLUMNS": "300"},
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "!!  PyTorch: it cannot be imported (ModuleNotFoundError: " in done.stdout
    assert "-> pip install torch" in done.stdout
    assert "broken: PyTorch, training" in done.stdout


def test_it_tells_which_calls_are_fastest_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def describe() -> Finding:
        return next(one for one in examine(quick=True) if one.name == "fastest calls")

    assert "FEDATTUNE_MEASURE is off" in describe().value
    monkeypatch.setenv("FEDATTUNE_MEASURE", "on")
    monkeypatch.setenv("FEDATTUNE_CACHE", str(tmp_path))
    measured._known.cache_clear()
    assert describe().value.startswith("none measured yet")
    clock = [0.0]
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    slow = lambda: clock.__setitem__(0, clock[0] + 0.01)  # noqa: E731
    for size, load in ((1, 0.0), (2, 0.0), (4, 1.0)):
        monkeypatch.setattr(measured._load, "count_busy_cores", lambda load=load: load)
        what = "linear" if size < 4 else "blocks"
        measured.choose(what, (size,), {"PyTorch": slow, "oneDNN": lambda: None})
    found = describe()
    measured._known.cache_clear()
    assert found.value == (
        "blocks by oneDNN (1 sizes), linear by oneDNN (2 sizes); 1 measured beside other busy processes, so the next "
        "run measures them again"
    )
    assert found.facts["machine"] == measured.describe_machine()
    assert found.facts["file"] == str(tmp_path / "choices.json")
    assert all(choice["seconds"]["PyTorch"] == pytest.approx(0.01) for choice in found.facts["choices"].values())


@pytest.mark.parametrize("has_it", [False, True])
def test_it_suggests_bfloat16_where_the_processor_has_it(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.core.hardware.has_cpu_bfloat16", lambda: has_it)
    (found,) = (one for one in examine(quick=True) if one.name == "bfloat16")
    assert ("--mixed-precision bfloat16" in found.value) == has_it
