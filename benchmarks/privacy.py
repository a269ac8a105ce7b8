"""Remake the table of epsilon against accuracy: methods with differential privacy at several budgets.

    python -m benchmarks privacy
    python -m benchmarks privacy --problems digits --epsilons inf,10 --seeds 1

The clipping norms were chosen by hand on the seed 0; a real choice would cost epsilon too.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Any

import numpy as np

import fedattune
from fedattune.core.errors import DivergedError
from fedattune.data import Federation

from .options import read_count, read_epsilons, read_output_file

METHODS = ("local", "fedavg", "ditto", "fedmcsa")
EPSILONS = (inf, 50.0, 10.0, 3.0, 1.0)


@dataclass(frozen=True)
class Problem:
    """Data with a model and settings.

    Attributes:
        load: loads the federation of a seed.
        model: name of the model.
        about: the sentence over the table.
        settings: settings of the runs.
    """

    load: Callable[[int], Federation]
    model: str
    about: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """What is protected: the settings for an epsilon, and the problems to measure it on."""

    setting: str
    problems: dict[str, Problem]

    def choose(self, epsilon: float) -> dict[str, float]:
        """Return the setting of a run with this epsilon; none for infinity."""
        return {} if isinf(epsilon) else {self.setting: epsilon}


def load_digits(seed: int) -> Federation:
    """Load handwritten digits of 100 clients."""
    options = {"beta": 0.5, "min_size": 6}
    return fedattune.load_federation("digits", partition="dirichlet", clients=100, partition_options=options, seed=seed)


def make_gaussians(seed: int, clients: int = 1000, rows: int = 20) -> Federation:
    """Draw clients whose rows have the same ten Gaussian classes, in Dirichlet(0.5) shares of their own."""
    random = np.random.default_rng([seed, clients])
    means = np.random.default_rng(0).normal(size=(10, 20))
    data = {}
    for i in range(clients):
        labels = random.choice(10, rows, p=random.dirichlet(np.full(10, 0.5)))
        inputs = means[labels] + 1.5 * random.normal(size=(rows, 20))
        data[f"{i:04d}"] = (inputs.astype(np.float32), labels)
    return fedattune.federation_from(data)


CLIENTS = {
    "digits": Problem(
        load_digits,
        "mlr",
        "digits, 100 clients (Dirichlet 0.5, about 12 training rows each), logistic regression, 30 rounds of all "
        "clients, delta 1e-3, clipped to 1",
        {"rounds": 30, "lr": 0.1, "dp_delta": 1e-3, "dp_client_clip": 1.0, "eval_every": 30},
    ),
    "gaussians": Problem(
        make_gaussians,
        "mlr",
        "ten Gaussian classes, 1,000 clients (Dirichlet 0.5, about 13 training rows each), logistic regression, 30 "
        "rounds of 100 clients, delta 1e-4, clipped to 0.3",
        {"rounds": 30, "lr": 0.1, "cohort": 100, "dp_delta": 1e-4, "dp_client_clip": 0.3, "eval_every": 30},
    ),
}


def load_few_digits(seed: int) -> Federation:
    """Load handwritten digits of five larger clients."""
    return fedattune.load_federation(
        "digits", partition="dirichlet", clients=5, partition_options={"beta": 0.5}, seed=seed
    )


def load_mnist(seed: int) -> Federation:
    """Load MNIST of ten clients, from the folder that FEDATTUNE_DATA names or from the hub."""
    return fedattune.load_federation(
        "mnist", partition="dirichlet", clients=10, partition_options={"beta": 0.5}, seed=seed
    )


RECORDS = {
    "digits": Problem(
        load_few_digits,
        "mlr",
        "digits, 5 clients (Dirichlet 0.5, about 240 training rows each), logistic regression, 20 rounds of one epoch "
        "of batches of 64, learning rate 0.5, delta 1e-4, clipped to 1",
        {"rounds": 20, "epochs": 1, "batch_size": 64, "lr": 0.5, "dp_delta": 1e-4, "eval_every": 20},
    ),
    "mnist": Problem(
        load_mnist,
        "mlr",
        "MNIST, 10 clients (Dirichlet 0.5, about 4,700 training rows each), logistic regression, 15 rounds of 10 steps "
        "of batches of 64, learning rate 0.5, delta 1e-5, clipped to 1",
        {"rounds": 15, "steps": 10, "batch_size": 64, "lr": 0.5, "dp_delta": 1e-5, "eval_every": 15},
    ),
}

LEVELS = {"client": Level("dp_client", CLIENTS), "record": Level("dp_record", RECORDS)}

Cells = dict[str, dict[str, list[float | None]]]
"""epsilon -> method -> accuracy of each seed; None if training diverged on all clients."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks privacy",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--level", choices=sorted(LEVELS), default="client", help="what is protected (default: %(default)s)")
    add("--problems", help="problems of the level (default: all)")
    add("--algorithms", default=",".join(METHODS), help="methods, the columns (default: %(default)s)")
    epsilons = ",".join(f"{e:g}" for e in EPSILONS)
    add("--epsilons", type=read_epsilons, default=epsilons, help="rows (default: %(default)s)")
    add("--seeds", type=read_count, default=3, help="splits and seeds (default: %(default)s)")
    add("--json", type=read_output_file, metavar="FILE", help="write the numbers of all seeds to FILE")
    return parser


def measure(level: Level, problem: Problem, given: argparse.Namespace) -> Cells:
    """Train every method with every budget on every seed."""
    methods, epsilons = given.algorithms.split(","), given.epsilons
    cells: Cells = {f"{epsilon:g}": {method: [] for method in methods} for epsilon in epsilons}
    for seed in range(given.seeds):
        data = problem.load(seed)
        for method in methods:
            for epsilon in epsilons:
                row = cells[f"{epsilon:g}"][method]
                if method == "local" and level.setting == "dp_client" and epsilon != epsilons[0]:
                    row.append(cells[f"{epsilons[0]:g}"][method][-1])  # nothing leaves a client
                    continue
                row.append(_train(level, problem, data, method, epsilon, seed))
                print(f"seed {seed}, {method}, epsilon {epsilon:g}: {row[-1]}", file=sys.stderr, flush=True)
    return cells


def _train(level: Level, problem: Problem, data: Federation, method: str, epsilon: float, seed: int) -> float | None:
    # Without an epsilon, some settings of privacy would be refused.
    private = () if not isinf(epsilon) else (f"{level.setting}_clip", f"{level.setting}_where")
    settings = {key: value for key, value in problem.settings.items() if key not in private}
    try:
        result = fedattune.fit(data, method, problem.model, seed=seed, **settings, **level.choose(epsilon))
    except DivergedError:
        return None
    return result.metrics["acc_uniform"]


def measure_slowdown(model: str, rounds: int = 30) -> float:
    """Return the ratio of the CPU time of a round with gradients of single rows to that of a plain one.

    Digits, 5 clients, 20 steps of 64 rows.
    """
    data, times = load_few_digits(0), []
    for privacy in ({}, {"dp_record_noise": 1.0}):
        seconds: list[float] = []
        fedattune.fit(
            data,
            "fedavg",
            model,
            rounds=2 * rounds,
            batch_size=64,
            eval_every=2 * rounds,
            callbacks=[fedattune.OnRound(lambda _, seconds=seconds: seconds.append(time.process_time()))],
            **privacy,
        )
        times.append(seconds[-2] - seconds[rounds - 1])  # without what the first rounds record
    return times[1] / times[0]


def write_table(cells: Cells) -> str:
    """Write the table in Markdown: mean and deviation over seeds, in percent."""
    methods = list(next(iter(cells.values())))
    lines = [" | ".join(["| epsilon", *methods]) + " |", "|---" * (len(methods) + 1) + "|"]
    for epsilon, row in cells.items():
        name = "none" if epsilon == "inf" else epsilon
        lines.append(" | ".join([f"| {name}", *(_write_cell(row[method]) for method in methods)]) + " |")
    return "\n".join(lines)


def _write_cell(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    return f"{np.mean(known):.1f} ±{np.std(known):.1f}" if known else "diverges"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of a level."""
    given = make_parser().parse_args(arguments)
    level, started = LEVELS[given.level], time.perf_counter()
    names = given.problems.split(",") if given.problems else list(level.problems)
    if unknown := [name for name in names if name not in level.problems]:
        raise SystemExit(f"no problem is called {unknown[0]!r}; expected one of: {', '.join(level.problems)}")
    measured = {}
    for name in names:
        measured[name] = measure(level, level.problems[name], given)
        print(f"{level.problems[name].about}\n\n{write_table(measured[name])}\n", flush=True)
        if given.json:
            given.json.write_text(json.dumps({"level": given.level, "cells": measured}, indent=1), "utf-8")
    if given.level == "record":
        ratios = " and ".join(f"{measure_slowdown(model):.1f} ({model})" for model in ("mlr", "dnn"))
        print(f"a round on digits with private gradients over one without: {ratios}")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0
