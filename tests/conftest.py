"""What all tests share."""

import os

# Several test processes share the cores; without this, their threads spin and wait for each other. Commands that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

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
