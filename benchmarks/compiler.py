"""Measure what each pass of the compiler of local steps gains, on a small DNN and a small CNN.

`python -m benchmarks.compiler` takes about a minute. It prints the table of docs/compiler.md: the time of a round
without a pass over the time with all passes. `python -m benchmarks ablate` measures the same on larger workloads.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fedattune import ClientUpdate
from fedattune.algorithms.pfedme import pfedme
from fedattune.client import SGD
from fedattune.core.hardware import use_threads
from fedattune.engine.compiler import compile as compiler

from .ablate import ALL, COMPILER_RULES, Rule, call_eagerly, without
from .problems import Problem, even
from .training import engine

ROUNDS = 7
"""Measured rounds of each way: a minute in all."""


def _step_eagerly(*arguments: Any) -> Any:
    return _compile_step(*arguments[:4], False)


_compile_step = compiler.compile_step

RULES = (
    *COMPILER_RULES,
    Rule("the compiler", ((compiler, "compile_step", _step_eagerly), (compiler, "compile_call", call_eagerly)), ()),
)


def _problem(model: str, quick: bool, **options: int) -> Problem:
    shape = (1, 16, 16) if model == "cnn" else (1, 28, 28)
    clients, steps = (2, 2) if quick else (10, 20)
    return Problem(even(clients, 100, shape), model, dict(options), batch=10, steps=steps)


NETWORKS: dict[str, Callable[[bool], tuple[Problem, ClientUpdate]]] = {
    "DNN": lambda quick: (_problem("dnn", quick), SGD()),
    "DNN, pFedMe": lambda quick: (_problem("dnn", quick), pfedme().client),
    "CNN": lambda quick: (_problem("cnn", quick, width=8, features=64), SGD()),
}
"""Networks and client rules: FedAvg's, and pFedMe's with five proximal steps on each batch."""


def measure_passes(quick: bool = False) -> dict[str, dict[str, float]]:
    """Return rule -> case -> processor time of a round without the rule over the time with all rules.

    One thread computes, the ways take turns, and the fastest round of each counts: so a busy machine changes the
    ratios little.
    """
    found: dict[str, dict[str, float]] = {}
    for name, make in NETWORKS.items():
        problem, rule = make(quick)
        way = partial(engine, problem, "auto", rule)
        ways = {ALL: way(), **{one.name: without(one, way) for one in RULES}}
        seconds: dict[str, list[float]] = {key: [] for key in ways}
        with use_threads(1):
            for round_ in range(1 if quick else ROUNDS + 1):  # the first one compiles
                for key, run in ways.items():
                    start = time.process_time()
                    run(round_)
                    seconds[key].append(time.process_time() - start)
        for one in RULES:
            found.setdefault(one.name, {})[name] = min(seconds[one.name]) / min(seconds[ALL])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="do next to nothing, to test that the cases run")
    given = parser.parse_args()
    found = measure_passes(given.quick)
    print(f"| without | {' | '.join(NETWORKS)} |\n|---|{'---|' * len(NETWORKS)}")
    for rule, ratios in found.items():
        print(f"| {rule} | {' | '.join(f'{ratio:.2f}' for ratio in ratios.values())} |")


if __name__ == "__main__":
    main()
