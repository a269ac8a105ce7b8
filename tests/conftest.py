"""Fixtures that tests of several packages share."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Several test processes share the cores; without this, their threads spin and wait for each other. Commands that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A choice that is measured on busy cores may differ between two processes, and their results by rounding.
os.environ.setdefault("FEDATTUNE_MEASURE", "off")

# A shell starts `make test &` with Ctrl-C ignored, and commands that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from cli_helpers import Done, environment
from crafted import compared
from fedattune import Federation
from fedattune.analysis.output.formats import TABLE_FORMATS
from fedattune.cli import main
from fedattune.core.metrics import METRICS
from fedattune.runs import store
from fedattune.server.robust import ROBUST_RULES
from fedattune.training import effects
from federations import make_federation

# No test cuts the power, and waiting for the disk takes a twentieth of the tests' time.
os.fsync = lambda _: None
store.SYNCHRONOUS = "OFF"


@pytest.fixture(scope="session")
def ragged() -> Federation:
    """Six clients of 14 to 60 samples, the smallest with fewer training samples than a batch."""
    return make_federation([14, 20, 31, 41, 50, 60])


@pytest.fixture(scope="session")
def equal() -> Federation:
    """Four clients of 40 samples."""
    return make_federation([40, 40, 40, 40], seed=1)


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of local, fedavg and fedmcsa with two seeds, made up; tests read the folder and do not write into it."""
    return compared(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and saved partitions of a test stay with the test run."""
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(autouse=True)
def own_registries() -> Iterator[None]:
    """Custom metrics, formats and robust rules of a test go with it."""
    registries: list[dict[str, Any]] = [METRICS, TABLE_FORMATS, ROBUST_RULES]
    known = [dict(registry) for registry in registries]
    yield
    for registry, before in zip(registries, known, strict=True):
        registry.clear()
        registry.update(before)


@pytest.fixture
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the round in which a run measures its mechanisms, where a test does not look at them."""
    if "mechanism" not in request.node.name:
        monkeypatch.setattr(effects, "MEASURED_CLIENTS", 0)


@pytest.fixture(scope="session")
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
def cli(work: Path, _one_thread: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process."""

    def run(*argv: object) -> Done:
        capsys.readouterr()
        code = main([str(one) for one in argv])
        return Done(code, *capsys.readouterr())

    return run


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
def start(work: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """The real command, begun. What still runs after a failed test is killed, or later tests get its warnings."""
    begun: list[subprocess.Popen[str]] = []

    def run(*argv: object) -> "subprocess.Popen[str]":
        begun.append(
            subprocess.Popen(
                [sys.executable, "-m", "fedattune", *map(str, argv)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
                cwd=work,
            )
        )
        return begun[-1]

    yield run
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()


TOGETHER = {
    "test_ray.py": "cluster",
    "test_ray_nodes.py": "cluster",
    "test_report_browser.py": "browser",
    "test_many_schools.py": "schools",
    "test_results.py": "results",
    "test_site.py": "results",
    "test_imports.py": "imports",
}
"""Files whose tests run in one process, one after the other, and what they share there."""


class Together(LoadScopeScheduling):
    """Tests go to whoever is free, but for those of a few files, and those of one method."""

    def _split_scope(self, nodeid: str) -> str:
        # pytest-xdist's own groups are lost on the way to the scheduler with this pytest.
        file, _, test = nodeid.partition("::")
        if file.endswith("test_conformance.py") and "[" in test:
            return test.rpartition("[")[2].rpartition("-")[2]  # tests of a method share its runs
        return next((group for name, group in TOGETHER.items() if file.endswith(name)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute tests over processes."""
    return Together(config, log)
