"""Give a model its inputs in the type that it takes."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.task import Task
from ..data import Federation
from ..data.on_disk import RowsOnDisk


def suit_inputs(federation: Federation, model: nn.Module) -> Federation:
    """Return the federation with its whole numbers as float32, if the model does not take them as int64.

    The model tries the samples with the smallest and the largest number. If it fails in both types, they stay int64.
    """
    if federation.x.dtype != torch.int64:
        return federation
    task, x = Task(model), take_extremes(federation)
    like = next(iter(task.params.values()))
    found = try_inputs(task, (x.to(like.device), x.to(like)))
    return replace(federation, x=federation.x.float()) if found and found[0].is_floating_point() else federation


def try_inputs(task: Task, candidates: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the first inputs that the model takes, with its outputs; None if it takes none of them."""
    for x in candidates:
        with suppress(Exception), torch.no_grad():
            return x, task.predict(task.params, task.buffers, x)
    return None


def take_extremes(federation: Federation) -> Tensor:
    """Return the int64 samples (2, ...) with the smallest and the largest number, which no vocabulary may lack.

    Of samples that stay in files, these are the first and the last.
    """
    if isinstance(federation.x, RowsOnDisk):
        return federation.features(torch.tensor([0, len(federation.x) - 1], device=federation.device))
    flat = federation.x.flatten(1)
    rows = torch.stack([flat.amin(1).argmin(), flat.amax(1).argmax()])
    return federation.features(rows)
