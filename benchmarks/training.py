"""W1 to W5: local training of a round, including the drawing of batches, without evaluation."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedattune import ClientUpdate, Payload
from fedattune.client import SGD
from fedattune.core.hardware import use_threads
from fedattune.engine import make_engine
from fedattune.engine.base import ClientInputs

from . import in_jax
from .floors import WRITTEN_OUT, Train, plain
from .manual import by_hand
from .measure import Case, Figures, Setting, Target, Way, Workload, lazily, measure, timed
from .problems import Problem, dirichlet, even, synthetic

EngineName = Literal["auto", "vectorized", "sequential"]

MLP_TARGETS = (
    Target("auto", "floor", 0.3),
    Target("auto", "manual", 0.55),
    Target("auto", "jax scan", 0.8),
    Target("auto", "jax vmap", 0.8),
)

CNN_TARGETS = (Target("auto", "floor", 0.6),)


def rival(problem: Problem, make: Callable[[Problem], Train]) -> Way:
    """Make a way that draws its batches and trains; round 0 uses the package's batches, to compare results."""

    def prepare() -> Way:
        train = make(problem)
        return lambda r: train(problem.orders(r) if r else problem.engine_orders(r))

    return lazily(prepare)


def engine(problem: Problem, name: EngineName, rule: ClientUpdate = SGD()) -> Way:  # noqa: B008 (it is frozen)
    """Make a way that trains all clients from one model by an engine and a client rule."""

    def prepare() -> Way:
        task, data = problem.task, problem.data
        engine = make_engine(name, task, data)
        n, device = data.n_clients, data.device
        yes = torch.ones(n, dtype=torch.bool, device=device)
        local_state = {key: value.copies(n) for key, value in rule.init_local_state(task.params).items()}
        inputs = ClientInputs(Payload(task.params.repeat(n)), local_state, task.buffers.repeat(n), yes, yes)
        ids = torch.arange(n, device=device)

        def run(round_: int) -> list[Tensor]:
            trained = engine.train(rule, ids, inputs, problem.work(round_))
            return list(trained.upload.params.values())

        return run

    return lazily(prepare)


PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
    "aten::mkldnn_convolution", "aten::convolution_backward", "mkldnn::_linear_pointwise",
)  # fmt: skip
"""Calls of PyTorch that multiply matrices or convolve."""


def measure_products(problem: Problem, setting: Setting) -> dict[str, float]:
    """Measure a round on one thread, and the time inside its products: the roofline of the very shapes, in place."""
    with use_threads(1):
        way = engine(problem, "auto")
        seconds = [timed(way, r, setting)[0] for r in range(2 if setting.quick else 7)]
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            way(len(seconds))
    inside = sum(one.self_cpu_time_total for one in watched.key_averages() if one.key in PRODUCTS)
    return {"one thread ms": 1e3 * statistics.median(seconds[1:]), "of which products ms": 1e-3 * inside}


def agree(problem: Problem, results: dict[str, Any]) -> None:
    """Check that all ways train the same models from the same batches.

    Raises:
        AssertionError: a tensor of most clients lies further from the floor's tensor than a hundredth of its change by
            training, or of one client than half of it. (Rounding flips a ReLU in a few clients.) In bfloat16, single
            biases lose most of their digits; the whole model counts, up to a quarter. So it does in TF32, in which
            PyTorch convolves on a GPU.
    """
    is_tf32 = problem.data.device.type == "cuda" and problem.model not in WRITTEN_OUT
    for name, models in results.items():
        if name == "bfloat16" or is_tf32:
            starts = problem.task.params.values()
            moved = _norm([a - start for a, start in zip(results["floor"], starts, strict=True)])
            apart = _norm([a - b for a, b in zip(results["floor"], models, strict=True)]) / moved
            if not apart.max() < 0.25:
                raise AssertionError(f"{name} trained models {apart.tolist()} of their way from the floor's")
            continue
        for key, start, a, b in zip(
            problem.task.params, problem.task.params.values(), results["floor"], models, strict=True
        ):
            moved = (a - start).flatten(1).norm(dim=1)
            apart = (a - b.to(a)).flatten(1).norm(dim=1) / moved
            if not (apart.median() < 0.01 and apart.max() < 0.5):
                raise AssertionError(f"{name} trained {key} {apart.tolist()} of its way from the floor's")


def _norm(models: list[Tensor]) -> Tensor:
    """Return the norm (C,) of each client's parameters taken together."""
    return torch.cat([tensor.flatten(1) for tensor in models], 1).norm(dim=1)


def training(
    name: str,
    about: str,
    problem: Problem,
    targets: tuple[Target, ...],
    repeats: int = 9,
    engines: tuple[EngineName, ...] = ("auto",),
) -> Workload:
    """Make the workload of one problem: the floor, the rivals that know the model, and some engines."""
    ways = {"floor": rival(problem, plain)}
    skipped = {}
    on_cpu = problem.data.device.type == "cpu"
    if problem.model in ("mlr", "dnn"):
        ways["manual"] = rival(problem, by_hand)
        if in_jax.MISSING or not on_cpu:
            skipped["jax"] = in_jax.MISSING or "The JAX that is tested has no GPU"
        else:
            ways["jax scan"] = rival(problem, in_jax.one_by_one)
            ways["jax vmap"] = rival(problem, in_jax.all_at_once)
    elif on_cpu:
        coarse = replace(problem, mixed_precision=True)
        ways["bfloat16"] = engine(coarse, "auto")
    for setting in engines:
        ways[setting] = engine(problem, setting)
    return Workload(
        name, about, ways, targets=targets, flops=problem.flops, bytes=problem.nbytes, repeats=repeats,
        check=partial(agree, problem), skipped=skipped,
    )  # fmt: skip


def on(problem: Problem, setting: Setting) -> Problem:
    """Return the problem with its data on the device of this run."""
    return replace(problem, data=problem.data.to(setting.device))


def _images(model: str) -> Callable[[bool], Problem]:
    return lambda quick: Problem(even(2, 8), model, batch=4, steps=2) if quick else Problem(even(20, 2000), model)


def _synthetic(model: str, options: dict[str, int | str]) -> Callable[[bool], Problem]:
    def make(quick: bool) -> Problem:
        if quick:
            return Problem(synthetic(3), model, options, batch=200, steps=2)
        return Problem(synthetic(100), model, options)

    return make


def _epoch(model: str) -> Callable[[bool], Problem]:
    def make(quick: bool) -> Problem:
        data = dirichlet(2, 90) if quick else dirichlet(20, 70_000)
        return Problem(data, model, batch=10, steps=None, epochs=1)

    return make


def _cnn(batch: int, steps: int) -> Callable[[bool], Problem]:
    def make(quick: bool) -> Problem:
        if quick:
            return Problem(even(2, 8), "cnn", {"width": 2, "features": 8}, batch=4, steps=2)
        return Problem(even(10, 1000), "cnn", batch=batch, steps=steps)

    return make


def _lenet(quick: bool) -> Problem:
    few = {"conv1": 6, "conv2": 16}
    if quick:
        return Problem(even(2, 8), "lenet", few, batch=4, steps=2)
    return Problem(even(10, 200, (3, 32, 32)), "lenet", few, batch=25, steps=8)


PROBLEMS: dict[str, tuple[str, Callable[[bool], Problem]]] = {
    "W1": ("MLR, MNIST shapes, 20 clients, 20 steps of 20", _images("mlr")),
    "W2": ("DNN-100, MNIST shapes, 20 clients, 20 steps of 20", _images("dnn")),
    "W3-mlr": ("MLR, Synthetic, 100 ragged clients, 20 steps of 20", _synthetic("mlr", {})),
    "W3-dnn": ("DNN-20, Synthetic, 100 ragged clients, 20 steps of 20", _synthetic("dnn", {"hidden": 20})),
    "W4-mlr": ("MLR, MNIST shapes, 20 Dirichlet clients, an epoch of 10", _epoch("mlr")),
    "W4-dnn": ("DNN-100, MNIST shapes, 20 Dirichlet clients, an epoch of 10", _epoch("dnn")),
    "W5-10": ("4-layer CNN, 10 clients, 20 steps of 10", _cnn(10, 20)),
    "W5-50": ("4-layer CNN, 10 clients, 10 steps of 50", _cnn(50, 10)),
    "W5-lenet": ("LeNet with 6 and 16 channels, CIFAR10 shapes, 10 clients, 8 steps of 25", _lenet),
}
"""Case -> description, and a function that makes its problem; True makes a tiny one."""


def _case(name: str, targets: tuple[Target, ...], repeats: int, engines: tuple[EngineName, ...]) -> Case:
    about, make = PROBLEMS[name]

    def run(setting: Setting) -> Figures:
        problem = on(make(setting.quick), setting)
        figures = measure(training(name, about, problem, targets, repeats, engines), setting)
        if setting.only is None and setting.device.type == "cpu":
            figures = replace(figures, values={"auto": measure_products(problem, setting)})
        return figures

    return Case(name, about, run)


CASES = (
    *(_case(name, MLP_TARGETS, 15, ("auto", "sequential")) for name in ("W1", "W2")),
    *(_case(name, MLP_TARGETS, 11, ("auto",)) for name in ("W3-mlr", "W3-dnn")),
    *(_case(name, MLP_TARGETS, 5, ("auto",)) for name in ("W4-mlr", "W4-dnn")),
    *(_case(name, CNN_TARGETS, 5, ("auto",)) for name in ("W5-10", "W5-50", "W5-lenet")),
)
