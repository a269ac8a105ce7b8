"""Compare the processor time of a round of methods with that of FedAvg.

    python -m benchmarks cost
    python -m benchmarks cost --algorithms attune,ditto --repeats 5

Of each federation, all methods train in turn, for as many rounds; the least time of all turns counts, without what a
run needs for its start. One thread.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import fedattune
from fedattune.core.errors import DataError
from fedattune.data import Federation

from .grid import METHODS

ROUNDS = 20
"""Rounds that count; a run of one round is taken from it."""

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


def measure_round(data: Federation, method: str, model: str, rounds: int) -> float:
    """Measure the processor time of a round in seconds, evaluations apart."""
    seconds = []
    for n in (1, 1 + rounds):
        started = time.process_time()
        fedattune.fit(
            data, method, model, rounds=n, eval_every=n, early_stopping="off", lr=0.05, batch_size=20, epochs=1
        )
        seconds.append(time.process_time() - started)
    return (seconds[1] - seconds[0]) / rounds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cost",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--algorithms", default="attune,ditto,apfl", help="methods (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count (default: %(default)s)")
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
        turns = [
            [measure_round(data, method, model, given.rounds) for method in ("fedavg", *methods)]
            for _ in range(given.repeats)
        ]
        first, *others = (min(each) for each in zip(*turns, strict=True))
        print(f"| {name} | {1000 * first:.1f} | {' | '.join(f'{one / first:.2f}' for one in others)} |", flush=True)
    return 0
