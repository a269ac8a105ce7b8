"""Switch off the engine's rules, one at a time: which of them does this machine need?

`python -m benchmarks ablate` (or `ablate-W4-dnn`). The floor is the package with all its rules; a way of 1.20 x floor
means that the workload takes 20% longer without the rule. A rule that gains less than 10% on every workload is not
worth its code.

Rules of the process (how memory is taken) are measured in fresh processes, beside fresh processes with all rules.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torch.nn.functional import linear

from fedattune import ClientUpdate
from fedattune.algorithms.pfedme import pfedme
from fedattune.client import SGD, Proximal
from fedattune.core import dense, hardware
from fedattune.engine import base, evaluator, kernels, runner, vectorized
from fedattune.engine.compiler import compile as compiler
from fedattune.engine.compiler import rewrites
from fedattune.engine.compiler.compile import PASSES, compile_call
from fedattune.engine.runner import Lanes

from . import evaluating, machine, mixing
from .measure import Case, Figures, Setting, Way, Workload, lazily, measure, timed
from .problems import Problem, even
from .training import PROBLEMS, engine, on

ALL = "all rules"

MAX_SECONDS = 10.0
"""Seconds after which a fresh process starts no further round."""


@dataclass(frozen=True)
class Rule:
    """A rule of the package, and how to switch it off.

    Attributes:
        name: what the rule does.
        off: (object, attribute, value without the rule), several of them.
        where: beginnings of the names of the workloads that it is for.
    """

    name: str
    off: tuple[tuple[Any, str, Any], ...]
    where: tuple[str, ...]

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Run the block without the rule, and without the scripts that were made with it."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(compiler, "_scripts", {}))
            for owner, attribute, value in self.off:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            yield


def _nothing(*_: object) -> None:
    """Do nothing: a pass that never applies."""


def _is_operation(node: Any) -> bool:
    """Keep every operation in the step, as one that draws random numbers."""
    return bool(node.op == "call_function")


def _lane_each(counts: Sequence[int], at_once: int = 1) -> list[Lanes]:
    """Give every client a lane of its own, as long as the longest client's."""
    clients = [i for i, n in enumerate(counts) if n]
    groups = [clients[g::at_once] for g in range(min(at_once, len(clients)))]
    return [runner._build_lanes([[i] for i in group], counts) for group in groups]


def _one_group(counts: Sequence[int], at_once: int = 1) -> list[Lanes]:
    """Put all lanes into one group, whose operations use PyTorch's threads."""
    del at_once
    return runner.pack_lanes(counts)


def call_eagerly(function: Callable[..., Any], tensors: Sequence[Any], *_: bool) -> Any:
    """Call what precedes and follows the steps, and predictions of blocks, through `vmap` each time."""
    return compile_call(function, tensors, False)


def _pass(name: str, *where: str) -> Rule:
    return Rule(name, ((compiler, "PASSES", {**PASSES, name: _nothing}),), where)


SMALL = ("W1", "W2", "W3", "W4", "pfedme", "fedprox")
TRAINED = (*SMALL, "W5")

COMPILER_RULES = (
    _pass("constants", *TRAINED),
    _pass("views", *TRAINED),
    _pass("transposes", *TRAINED),
    _pass("scaled sums", *TRAINED),
    _pass("pulls", "pfedme", "fedprox"),
    _pass("product reuse", "pfedme"),
    _pass("product order", *SMALL),
    _pass("adding products", *TRAINED),
    _pass("pooling", "W5"),
    _pass("masks", "W5"),
    Rule("before the first step", ((rewrites, "draws_random", _is_operation),), TRAINED),
    Rule("in place", ((rewrites, "IN_PLACE", {}),), TRAINED),
    Rule("TorchScript loop", ((compiler, "_script", lambda step, *_: step),), TRAINED),
    Rule("calls around the steps", ((compiler, "compile_call", call_eagerly),), (*SMALL, "W6")),
)
"""Passes of the compiler of local steps, in order, and what it does with a step after them."""

RULES = (
    *COMPILER_RULES,
    Rule("groups in threads", ((vectorized, "pack_lanes", _one_group),), SMALL),
    Rule("several clients in a lane", ((vectorized, "pack_lanes", _lane_each),), ("W3", "W4")),
    Rule("channels-last pooling", ((kernels, "_make_adjacent", lambda x: x),), ("W5",)),
    Rule("images of few channels together", ((kernels, "MAX_CHANNELS", 0),), ("W5",)),
    Rule("maxima of four pixels", ((kernels, "QUARTERS", ()),), ("W6",)),
    Rule("linear layers by the measured library", ((dense, "linear", linear),), ("W6",)),
    Rule("large parts alone", ((evaluator, "MIN_LARGE_CALLS", 1 << 40),), ("W6",)),
    Rule("inputs in memory", ((base, "INPUT_CACHE_BYTES", 0),), ("W6",)),
)

FREED_MEMORY, HUGE_PAGES = "keeping freed memory", "huge pages"

PROCESS_RULES = {
    FREED_MEMORY: ("W1", "W2", "W3", "W4", "W5", "W6", "pfedme", "W7"),
    HUGE_PAGES: ("W1", "W2", "W4", "W5", "W6", "pfedme", "W7"),
}
"""Rule of the whole process -> beginnings of the names of the workloads that it is for."""

MORE: dict[str, tuple[str, Callable[[bool], Problem], ClientUpdate]] = {
    "pfedme-mlr": ("pFedMe, MLR, MNIST shapes, 20 clients, 20 steps of 20", PROBLEMS["W1"][1], pfedme().client),
    "pfedme-dnn": (
        "pFedMe, DNN-100, CIFAR10 shapes, 20 clients, 20 steps of 20",
        lambda quick: (
            Problem(even(2, 8, (3, 4, 4)), "dnn", batch=4, steps=2)
            if quick
            else Problem(even(20, 500, (3, 32, 32)), "dnn")
        ),
        pfedme().client,
    ),
    "fedprox": ("FedProx, MLR, MNIST shapes, 20 clients, 20 steps of 20", PROBLEMS["W1"][1], SGD((Proximal(0.1),))),
}

MIXED = ("W7-mcsa-resnet", "W7-mcsa-dnn", "W7-pfedla-100")


def make_way(name: str, setting: Setting) -> Callable[[], Way]:
    """Make a function that makes the package's way of a workload."""
    if name in evaluating.EVALUATED:
        problem = evaluating.evaluated(name, setting)
        models = evaluating.personal(problem)
        return lambda: evaluating.engine(problem, models, "auto")
    if name in MIXED:
        return mixing.all_ways(name, setting)["fedattune"]
    rule: ClientUpdate = SGD()
    if name in MORE:
        _, make, rule = MORE[name]
    else:
        _, make = PROBLEMS[name]
    problem = on(make(setting.quick), setting)
    return lambda: engine(problem, "auto", rule)


def without(rule: Rule, make: Callable[[], Way]) -> Way:
    """Make a way without a rule."""
    inner = lazily(make)

    def run(round_: int) -> Any:
        with rule.switched_off():
            return inner(round_)

    return run


def _is_for(where: Sequence[str], name: str) -> bool:
    return any(name.startswith(start) for start in where)


def measure_rules(name: str, about: str, setting: Setting) -> Figures:
    """Measure a workload in this process with all rules, and without each of RULES that is for it."""
    rules = [rule for rule in RULES if _is_for(rule.where, name)]
    if not rules:
        return Figures(name, about, {}, floor=ALL, paired=True)
    make = make_way(name, setting)
    ways = {ALL: lazily(make), **{rule.name: without(rule, make) for rule in rules}}
    return measure(Workload(name, about, ways, floor=ALL), replace(setting, memory=False))


def _run(name: str, about: str, setting: Setting) -> Figures:
    figures = measure_rules(name, about, setting)
    repeats = 1 if setting.quick else 3
    values: dict[str, dict[str, float]] = {}
    for rule in (rule for rule, where in PROCESS_RULES.items() if _is_for(where, name)):
        alone = [(_median_alone(name, rule, setting), _median_alone(name, "", setting)) for _ in range(repeats)]
        values[rule] = {f"x {ALL}, in fresh processes": statistics.median(a / b for a, b in alone)}
    return replace(figures, values=values)


def _median_alone(name: str, rule: str, setting: Setting) -> float:
    """Return the median seconds of a workload in a fresh process without one of PROCESS_RULES."""
    quick = ["--quick"] if setting.quick else []
    environment = {"THP_MEM_ALLOC_ENABLE": "0"} if rule == HUGE_PAGES else {}
    with mock.patch.dict(os.environ, environment):
        return float(machine.fresh("benchmarks.ablate", name, rule, *quick)["seconds"])


def main() -> None:
    """Time one workload in this process without one of PROCESS_RULES; print the median seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("rule", choices=("", *PROCESS_RULES))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    setting = Setting(quick=given.quick)
    machine.set_threads(None)
    with ExitStack() as stack:
        if given.rule == FREED_MEMORY:
            for module in (hardware, vectorized, mixing):
                stack.enter_context(mock.patch.object(module, "keep_freed_memory", _nothing))
        way = make_way(given.name, setting)()
        times: list[float] = []
        while len(times) < (2 if given.quick else 4) or (len(times) < 12 and sum(times) < MAX_SECONDS):
            times.append(timed(way, len(times), setting)[0])
    print(json.dumps({"seconds": statistics.median(times[1:])}))


def _case(name: str, about: str) -> Case:
    return Case(f"ablate-{name}", about, lambda setting: _run(name, about, setting), only_by_name=True)


CASES = (
    *(_case(name, about) for name, (about, _) in PROBLEMS.items()),
    *(_case(name, about) for name, (about, *_) in MORE.items()),
    *(_case(case.name, case.about) for case in evaluating.CASES),
    *(_case(name, mixing.MIXED[name][0]) for name in MIXED),
)


if __name__ == "__main__":
    main()
