"""W10: W1 to W7 on a GPU against the same floor there, and ResNet-18 on CIFAR shapes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from . import evaluating, training
from .floors import plain
from .machine import Rates, measure_rates
from .measure import Case, Figures, Setting, Skip, Target, Workload, measure
from .problems import Problem, even

MIXING = import_module("benchmarks.mixing").CASES if find_spec("benchmarks.mixing") else ()
TARGETS = {"W1": 1 / 20, "W2": 1 / 20, "W3": 1 / 20, "W4": 1 / 20}
"""Largest share of the time of the GPU's floor; cases without an entry may take as long as the floor."""


def resnet(setting: Setting) -> Workload:
    """Make the workload of ResNet-18 with the stem for small images: 10 clients, 20 steps of 20, local BatchNorm."""
    if setting.quick:
        problem = Problem(even(2, 6, (3, 8, 8)), "resnet18", {"width": 2, "stem": "3x3"}, batch=3, steps=1)
    else:
        problem = Problem(even(10, 500, (3, 32, 32)), "resnet18", {"stem": "3x3"}, batch=20, steps=20)
    problem = training.on(problem, setting)
    workload = training.training(
        "W10-resnet", RESNET, problem, (Target("auto", "floor", 0.5),), 5, ("auto", "sequential")
    )
    return replace(workload, check=partial(agree_in_one_step, problem))


def agree_in_one_step(problem: Problem, _: Mapping[str, Any]) -> None:
    """Check that floor and engine train the same models in one step.

    In twenty steps, rounding takes ResNet-18 half of its way elsewhere: so does a start that differs by 1e-6.
    """
    one = replace(problem, steps=1)
    models = {"floor": plain(one)(one.engine_orders(0)), "auto": training.engine(one, "auto")(0)}
    training.agree(one, models)


RESNET = "ResNet-18, CIFAR shapes, 10 clients, 20 steps of 20"


def _resnet(setting: Setting) -> Figures:
    setting = replace(on_gpu(setting), memory=False)
    return measure(resnet(setting), setting)


def on_gpu(setting: Setting) -> Setting:
    """Return the setting with the GPU and its rates.

    Raises:
        Skip: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise Skip("PyTorch finds no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    return replace(setting, device=device, rates=_rates(device, setting.quick))


@cache
def _rates(device: torch.device, quick: bool) -> Rates:
    return measure_rates(device, quick)


def _moved(case: Case, name: str, setting: Setting) -> Figures:
    """Turn a case of the CPU into a case of the GPU with its own name and targets."""
    figures = case.run(replace(on_gpu(setting), memory=False))
    most = TARGETS.get(case.name.split("-")[0], 1.0)
    targets = (Target("auto", "floor", most),) if "auto" in figures.seconds else figures.targets
    return replace(figures, name=name, targets=targets)


def _gpu_cases() -> tuple[Case, ...]:
    cases = []
    for case in (*training.CASES, *evaluating.CASES, *MIXING):
        name = "W10-" + case.name
        cases.append(Case(name, f"On a GPU: {case.about}", partial(_moved, case, name)))
    cases.append(Case("W10-resnet", f"On a GPU: {RESNET}", _resnet))
    return tuple(cases)


CASES = _gpu_cases()
