"""What all tests share."""

import os

# Several test processes share the cores; without this, their threads spin and wait for each other. Commands that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from fedattune import Federation
from federations import make_federation


@pytest.fixture(scope="session")
def ragged() -> Federation:
    """Six clients of 14 to 60 samples, the smallest with fewer training samples than a batch."""
    return make_federation([14, 20, 31, 41, 50, 60])


@pytest.fixture(scope="session")
def equal() -> Federation:
    """Four clients of 40 samples."""
    return make_federation([40, 40, 40, 40], seed=1)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and saved partitions of a test stay with the test run."""
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path_factory.getbasetemp() / "home"))


TOGETHER = ("test_ray.py", "test_ray_nodes.py", "test_report_browser.py")
"""Files whose tests run in one process, one after the other: they share a cluster or a browser."""


class Together(LoadScopeScheduling):
    """Tests go to whoever is free, but for those of a few files."""

    def _split_scope(self, nodeid: str) -> str:
        # pytest-xdist's own groups are lost on the way to the scheduler with this pytest.
        file = nodeid.partition("::")[0]
        return ("ray" if "test_ray" in file else file) if file.endswith(TOGETHER) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute tests over processes."""
    return Together(config, log)
