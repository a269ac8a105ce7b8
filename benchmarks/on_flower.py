"""Measure the parts of a deployed run against the engine: `python -m benchmarks flower`.

The ServerApp and ClientApp of a real network exchange messages in one process. As in Flower's own processes, a new
node, made from its files on disk, answers each message. A network, and Flower's polling and processes, add about six
seconds a message (docs/deployment.md).
"""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedattune
from fedattune import Federation

from .measure import Case, Figures, Setting, Skip

ROUNDS = 8
ABOUT = {
    "flower-5": "MLR, MNIST shapes, 5 clients at 5 nodes, 20 steps of 20",
    "flower-100": "MLR, MNIST shapes, 100 clients at 5 nodes, 20 steps of 20",
}


def images(n_clients: int) -> Federation:
    """Make clients with 100 random images of MNIST's shape each."""
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [(torch.randn(100, 784, generator=generator), torch.arange(100) % 10) for _ in range(n_clients)]
    )


def deployed(data: Federation, folder: Path, settings: dict[str, Any]) -> list[float]:
    """Time the rounds of a run over nodes in this process."""
    from tests.flower.in_process import InProcessGrid

    from fedattune.data import deal_clients, export_clients, infer_schema
    from fedattune.deploy.node.client_app import make_client_app
    from fedattune.deploy.server.server_app import run_server

    folders = export_clients(data, folder / "data", deal_clients(data.n_clients, 5))
    config = {
        "algorithms": "fedavg",
        "model": "mlr",
        "run-folder": str(folder / "run"),
        "nodes": 5,
        "poll": 1e-4,
        "data-schema": infer_schema(data).to_json(),
        **{key.replace("_", "-"): value for key, value in settings.items()},
    }
    nodes = [{"data": str(path), "state": str(folder / f"state-{i}")} for i, path in enumerate(folders)]
    moments: list[float] = []

    def log(sentence: str) -> None:
        if ": round " in sentence:
            moments.append(time.perf_counter())

    run_server(InProcessGrid(make_client_app(), nodes, config), config, log=log)
    return np.diff(moments)[1:-1].tolist()


def simulated(data: Federation, settings: dict[str, Any]) -> list[float]:
    """Time the rounds of the same run in the engine."""
    moments: list[float] = []
    watch = fedattune.OnRound(lambda _: moments.append(time.perf_counter()))
    fedattune.fit(data, "fedavg", "mlr", callbacks=[watch], **settings)
    return np.diff(moments)[1:-1].tolist()


def measure_case(name: str, setting: Setting) -> Figures:
    """Measure one case in the engine, and over nodes in this process."""
    if find_spec("flwr") is None:
        raise Skip("Flower is not installed")
    rounds = 5 if setting.quick else ROUNDS
    data = images(5 if setting.quick else int(name.partition("-")[2]))
    settings: dict[str, Any] = {"rounds": rounds, "eval_every": rounds, "lr": 0.01}
    found: dict[str, list[float]] = {"engine": [], "nodes": []}
    for _ in range(1 if setting.quick else setting.repeats or 3):
        found["engine"] += simulated(data, settings)
        with tempfile.TemporaryDirectory() as folder:
            found["nodes"] += deployed(data, Path(folder), settings)
    return Figures(name, ABOUT[name], found, "engine", paired=True)


CASES = tuple(
    Case(name, about, lambda setting, name=name: measure_case(name, setting))  # type: ignore[misc]
    for name, about in ABOUT.items()
)
