"""Small federations that every test can afford."""

import os

# Several test processes share the cores; without this, their threads spin and wait for each other. Commands that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import fedattune
from fedattune import Federation


def make_federation(sizes: list[int], *, features: int = 5, classes: int = 3, seed: int = 0) -> Federation:
    """Clients of different sizes; every other one labels its samples by another rule."""
    generator = torch.Generator().manual_seed(seed)
    rules = [torch.randn(features, classes, generator=generator) for _ in range(2)]
    clients = []
    for number, size in enumerate(sizes):
        x = torch.randn(size, features, generator=generator)
        y = (x @ rules[number % 2]).argmax(1)
        y[:classes] = torch.arange(classes)  # every client knows every class
        clients.append((x, y))
    return fedattune.federation(clients)


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
