"""W11: the whole of `fedattune compare`, from the start of its process to its report, beside its training steps alone.

A fresh process runs the command in one process of its own. The clock of `training` runs inside `engine.train`, but not
while a step is recorded, which happens once per method. The rest is the start of Python and PyTorch, data, recording,
server, evaluation, storage and the report.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import machine
from .measure import Case, Figures, Setting, Skip, Target
from .parallel import METHODS

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "digits": ("--data", "digits", "--partition", "dirichlet", "--clients", "20", "--model", "dnn"),
    "synthetic": ("--data", "synthetic", "--set", "synthetic.clients=100", "--model", "mlr"),
    "mnist": ("--data", "mnist", "--partition", "dirichlet", "--clients", "20", "--model", "dnn", "--epochs", "1",
              "--batch-size", "10"),
}  # fmt: skip

ROUNDS = 100

IMPORTS = ("torch",)
"""Modules of other packages that every comparison imports."""


class _Clock:
    """Sum the seconds inside calls of a function."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.process_time() - cpu

        return timed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command in this process; print seconds of the process and of its training, or of a start with IMPORTS."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--born", type=float)
    parser.add_argument("--imports", action="store_true")
    given, command = parser.parse_known_args(arguments)
    if given.imports:
        for name in IMPORTS:
            importlib.import_module(name)
        print(json.dumps({"start": time.time() - given.born}))
        return
    from fedattune.cli import main as run
    from fedattune.engine.compiler.compile import Compiler
    from fedattune.engine.vectorized import VectorizedEngine

    training, recording, evaluation = _Clock(), _Clock(), _Clock()
    VectorizedEngine.train = training.around(VectorizedEngine.train)  # type: ignore[method-assign]
    VectorizedEngine.evaluate = evaluation.around(VectorizedEngine.evaluate)  # type: ignore[method-assign]
    Compiler.step = recording.around(Compiler.step)  # type: ignore[method-assign]
    code = run(command)
    if code:
        raise SystemExit(code)
    times = {
        "wall": time.time() - given.born,
        "cpu": time.process_time(),
        "training": training.wall - recording.wall,
        "training cpu": training.cpu - recording.cpu,
        "recording": recording.wall,
        "evaluation": evaluation.wall,
    }
    print(json.dumps(times))


def _run(name: str, setting: Setting) -> Figures:
    if name == "mnist" and not (os.environ.get("FEDATTUNE_DATA") or setting.quick):
        raise Skip("FEDATTUNE_DATA names no folder with MNIST")
    rounds = "2" if setting.quick else str(ROUNDS)
    methods, data = METHODS, EXPERIMENTS[name]
    if setting.quick:
        methods, data = "fedmcsa", ("--data", "digits", "--clients", "2")
    line = ["compare", "--algorithms", methods, *data, "--rounds", rounds, "--processes", "1", "--quiet"]
    found = []
    for _ in range(setting.repeats or (1 if setting.quick else 3)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(machine.fresh("benchmarks.whole", "--born", str(time.time()), *line, "--out", f"{folder}/o"))
    starts = [machine.fresh("benchmarks.whole", "--born", str(time.time()), "--imports")["start"] for _ in found]
    values = {
        "compare": {
            "start s": min(starts),
            "CPU s": min(one["cpu"] for one in found),
            "recording s": min(one["recording"] for one in found),
            "evaluation s": min(one["evaluation"] for one in found),
        },
        "training": {"CPU s": min(one["training cpu"] for one in found)},
    }
    return Figures(
        f"W11-{name}",
        f"{' '.join(line[:-3])}: the whole process beside its training",
        {"training": [one["training"] for one in found], "compare": [one["wall"] for one in found]},
        floor="training",
        targets=(Target("compare", "training", 2.0),),
        values=values,
        paired=True,
    )


CASES = tuple(
    Case(f"W11-{name}", f"the whole of compare on {name}, {ROUNDS} rounds", partial(_run, name)) for name in EXPERIMENTS
)


if __name__ == "__main__":
    main(sys.argv[1:])
