"""Compare the processor time of a round of methods with that of FedAvg.

    python -m benchmarks cost
    python -m benchmarks cost --algorithms attune,ditto --repeats 5

Of each federation, all methods train in turn, and each round is timed but the first ones of a run, which compile (and
in which `attune` finds groups). The 20% quantile counts, as other work on the machine slows the rest. One thread.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

import fedattune
from fedattune.core.errors import DataError
from fedattune.data import Federation

from .grid import METHODS
from .options import read_count

ROUNDS = 20
"""Rounds of a run that count."""

FIRST_ROUNDS = 3
"""Rounds before them."""

QUANTILE = 0.2
"""Share of the rounds that take less than the time that counts."""

Loader = Callable[[], Federation]

PROBLEMS: dict[str, tuple[Loader, str]] = {
    "digits, dnn": (partial(fedattune.load_federation, "digits", partition="dirichlet", clients=20), "dnn"),
    "mnist, dnn": (
        partial(fedattune.load_federation, "mnist", options={"samples": 4000}, partition="dirichlet", clients=20),
        "dnn",
    ),
    "mnist, cnn": (
        partial(fedattune.load_federation, "mnist", options={"samples": 500}, partition="dirichlet", clients=10),
        "cnn",
    ),
}
"""Name -> federation and model."""


def time_rounds(data: Federation, method: str, model: str, rounds: int) -> list[float]:
    """Return the processor time of each round in seconds, evaluations apart."""
    ends: list[float] = []
    n = FIRST_ROUNDS + rounds
    fedattune.fit(
        data,
        method,
        model,
        rounds=n + 1,  # models are evaluated after the last one
        eval_every=n + 1,
        early_stopping="off",
        lr=0.05,
        batch_size=20,
        epochs=1,
        callbacks=[fedattune.OnRound(lambda _: ends.append(time.process_time()))],
    )
    times: list[float] = np.diff(ends)[FIRST_ROUNDS - 1 : n - 1].tolist()
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cost",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--algorithms", default="attune,ditto,apfl", help="methods (default: %(default)s)")
    add("--repeats", type=read_count, default=3, help="turns (default: %(default)s)")
    add("--rounds", type=read_count, default=ROUNDS, help="rounds of a turn (default: %(default)s)")
    given = parser.parse_args(arguments)
    methods = given.algorithms.split(",")
    if unknown := [name for name in methods if name not in METHODS]:
        raise SystemExit(f"algorithms: {unknown[0]!r} is unknown; expected some of: {', '.join(METHODS)}")
    torch.set_num_threads(1)
    print(f"| federation | fedavg ms | {' | '.join(methods)} |\n|---{'|---' * (1 + len(methods))}|")
    for name, (load, model) in PROBLEMS.items():
        try:
            data = load()
        except DataError as error:
            print(f"{name}: skipped: {error}")
            continue
        times: dict[str, list[float]] = {method: [] for method in ("fedavg", *methods)}
        for method in list(times) * given.repeats:
            times[method] += time_rounds(data, method, model, given.rounds)
        first, *others = (float(np.quantile(each, QUANTILE)) for each in times.values())
        print(f"| {name} | {1000 * first:.1f} | {' | '.join(f'{one / first:.2f}' for one in others)} |", flush=True)
    return 0
