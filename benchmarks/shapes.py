"""The roofline of a workload's own shapes: its matrix products and convolutions, and nothing else.

The machine's roofline comes from square matrices. The products of a step are small and narrow, and the library
multiplies them at a fraction of that rate. This way runs the same products, of the same sizes, as often, on as many
cores, by the calls that PyTorch offers. What a round takes beyond is the package's own.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedattune.core.hardware import count_parallel_groups, run_parallel
from fedattune.training.engine.runner import pack_lanes

from .measure import Way
from .problems import Problem

Call = Callable[[], object]


def bare_products(problem: Problem) -> Way:
    """Make a way that runs the products of forward and backward passes: of lanes together, or of clients alone."""
    n_groups = count_parallel_groups(problem.data.device)
    steps = [used // problem.size(client) for client, (_, used) in enumerate(problem.draws)]
    batch = problem.batch
    if problem.task.is_fastest_alone:
        loads = [(1, sum(steps[i::n_groups])) for i in range(n_groups)]
    else:
        loads = [(len(lanes.clients), lanes.steps) for lanes in pack_lanes(steps, n_groups)]
    groups = [(_calls(problem, models, batch), repeats) for models, repeats in loads]

    def repeat(calls: list[Call], times: int) -> None:
        for _ in range(times):
            for call in calls:
                call()

    @torch.no_grad()
    def run(_: int) -> list[Tensor]:
        run_parallel([partial(repeat, calls, times) for calls, times in groups])
        return []

    return run


def _calls(problem: Problem, models: int, batch: int) -> list[Call]:
    """Return the products of one step of `models` models on batches of `batch` samples."""
    found: list[tuple[nn.Module, Tensor]] = []
    layers = [m for m in problem.task.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [
        m.register_forward_hook(lambda m, given, _: found.append((m, given[0].detach()))) for m in layers
    ]
    problem.task.model(problem.data.features(torch.zeros(batch, dtype=torch.int64)))
    for hook in hooks:
        hook.remove()
    calls: list[Call] = []
    for i, (layer, x) in enumerate(found):
        is_first = i == 0  # nothing before it learns
        if isinstance(layer, nn.Conv2d):
            calls += _convolution(layer, x, is_first)
        elif isinstance(layer, nn.Linear):
            calls += _linear(layer, x, models, is_first)
    return calls


def _linear(layer: nn.Linear, x: Tensor, models: int, is_first: bool) -> list[Call]:
    inputs = x.expand(models, *x.shape).contiguous()
    weight = layer.weight.detach().repeat(models, 1, 1)
    errors = torch.zeros(models, len(x), layer.out_features)
    calls: list[Call] = [
        lambda: torch.bmm(inputs, weight.transpose(1, 2)),
        lambda: weight.baddbmm_(errors.transpose(1, 2), inputs, alpha=-1e-3),
    ]
    return calls if is_first else [*calls, lambda: torch.bmm(errors, weight)]


def _convolution(layer: nn.Conv2d, x: Tensor, is_first: bool) -> list[Call]:
    weight, how = layer.weight.detach(), (layer.stride, layer.padding, layer.dilation)
    forward = partial(torch.conv2d, x, weight, None, *how, layer.groups)
    errors = torch.zeros_like(forward())
    wanted = [not is_first, True, False]
    backward = partial(
        torch.ops.aten.convolution_backward.default,
        errors, x, weight, None, *how, False, [0, 0], layer.groups, wanted,
    )  # fmt: skip
    return [forward, backward]
