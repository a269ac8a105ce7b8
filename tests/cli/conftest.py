"""Run the command in this process (fast) or in one of its own (real)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_helpers import Done

from fedattune.cli import main

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Let tests in parallel not fight for the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a home of FedAttune's own beside it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDATTUNE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return folder


@pytest.fixture
def cli(work: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process."""

    def run(*argv: object) -> Done:
        capsys.readouterr()
        code = main([str(one) for one in argv])
        return Done(code, *capsys.readouterr())

    return run


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def process(work: Path) -> Callable[..., Done]:
    """The real command in a process of its own."""

    def run(*argv: object) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "fedattune", *map(str, argv)],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=work,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start(work: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """The real command, begun."""

    def run(*argv: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "fedattune", *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=work,
        )

    return run
