"""Compare clients on actors of Ray with the same clients in one process: `python -m benchmarks ray`.

Both train the same clients from the same batches. One process uses all cores; each core has one actor with one
thread. Runs take turns. The time of a round is the time between the ends of two rounds of `fit`, without the first
rounds and the last one, which evaluates. Ray starts once, outside the clock. RAY_ADDRESS names a cluster to join.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import fedattune
from fedattune import Federation, Settings

from .measure import Case, Figures, Setting, Skip, Target
from .population import population

WARM_ROUNDS = 2
"""Rounds of each run that are not counted."""


@dataclass(frozen=True)
class Training:
    """One run to measure."""

    about: str
    data: Callable[[bool], Federation]
    model: str
    settings: Mapping[str, Any]
    methods: tuple[str, ...] = ("fedavg",)
    rounds: int = 8


def images(quick: bool) -> Federation:
    """Make clients with 100 random images of CIFAR's shape each."""
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [(torch.randn(100, 3, 32, 32, generator=generator), torch.arange(100) % 10) for _ in range(2 if quick else 16)]
    )


def points(quick: bool) -> Federation:
    """Make clients with 40 random points each."""
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [(torch.randn(40, 5, generator=generator), torch.arange(40) % 3) for _ in range(2 if quick else 10)]
    )


TRAININGS = {
    "ray-cnn": Training(
        "CNN, 16 clients of 100 CIFAR-shaped images, 5 steps of 50", images, "cnn", {"steps": 5, "batch_size": 50}
    ),
    "ray-overhead": Training(
        "MLR with 18 values, 10 clients, 1 step: what a round takes that has nothing to do",
        points,
        "mlr",
        {"steps": 1},
        rounds=100,
    ),
    "ray-10000": Training(
        "MLR, MNIST shapes, 100 of 10,000 clients per round, 20 steps of 20",
        lambda quick: population(200 if quick else 10_000),
        "mlr",
        {"cohort": 100, "train": "cohort", "eval_clients": 100},
        methods=("fedavg", "ditto", "fedmcsa"),
        rounds=60,  # an actor that is asked for a number of clients for the first time records their steps
    ),
}


def seconds(training: Training, method: str, data: Federation, rounds: int, **engine: Any) -> tuple[list[float], float]:
    """Return the seconds of the counted rounds of one run, and the seconds until its first round ended."""
    moments = [time.perf_counter()]
    fedattune.fit(
        data,
        method,
        training.model,
        callbacks=[fedattune.OnRound(lambda _: moments.append(time.perf_counter()))],
        **{**training.settings, "rounds": rounds, "eval_every": rounds, **engine},
    )
    took = np.diff(moments)
    return took[min(WARM_ROUNDS, rounds - 2) : -1].tolist(), float(took[0])


def measure_case(name: str, setting: Setting) -> Figures:
    """Measure one run in one process and on actors."""
    _needs_ray()
    from fedattune.training.backends.ray import connect_ray

    training = TRAININGS[name]
    data = training.data(setting.quick)
    rounds = 3 if setting.quick else training.rounds
    engines = {"1 process": {}, "actors": {"engine": "ray"}}
    found: dict[str, list[float]] = {}
    values: dict[str, dict[str, float]] = {}
    more = {"cohort": 1.0, "steps": 1} if setting.quick else {}
    with connect_ray(Settings(engine="ray")):
        seconds(training, "fedavg", data, 3, **engines["actors"], **more)  # the actors start
        for _ in range(1 if setting.quick else setting.repeats or 3):
            for method in training.methods:
                for engine, given in engines.items():
                    way = engine if len(training.methods) == 1 else f"{method}, {engine}"
                    took, first = seconds(training, method, data, rounds, **given, **more)
                    found.setdefault(way, []).extend(took)
                    values.setdefault(way, {})["first round s"] = first
    floor = next(iter(found))
    targets = (Target("actors", floor, 1.0),) if name == "ray-cnn" else ()
    return Figures(name, training.about, found, floor, targets, values=values, paired=len(found) == 2)


def _needs_ray() -> None:
    if find_spec("ray") is None:
        raise Skip("Ray is not installed")


CASES = tuple(
    Case(name, training.about, lambda setting, name=name: measure_case(name, setting))  # type: ignore[misc]
    for name, training in TRAININGS.items()
)
