"""Runs to report on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fedattune
from fedattune import Federation
from federations import make_federation

METHODS = ("local", "fedavg", "fedmcsa")


def train(folder: Path, data: Federation, methods: tuple[str, ...] = METHODS, **settings: Any) -> None:
    """Runs of some methods with two seeds, as `compare` keeps them."""
    settings = {"rounds": 4, "cohort": 4, "steps": 2, "lr": 0.1, **settings}
    for name in methods:
        for seed in (0, 1):
            fedattune.fit(data, name, seed=seed, out=folder / name / f"seed-{seed}", **settings)


def train_odd(folder: Path) -> Path:
    """Runs of three methods with two seeds on clients with odd names."""
    data = make_federation([14, 20, 31, 41, 50, 60])
    names = ["ward <b>7</b>", "</script>", *data.names[2:]]
    data = replace(data, clients=tuple(replace(c, name=n) for c, n in zip(data.clients, names, strict=True)))
    train(folder, data)
    return folder
