"""How clients are run: one at a time (Loop, the reference) or as one batch of models (Batched)."""

from typing import Literal

import torch

from ..data import Federation
from ..task import Task
from .base import Engine, Inputs, Scores, Trained
from .batched import Batched
from .loop import Loop
from .work import Work

__all__ = ["Batched", "Engine", "Inputs", "Loop", "Scores", "Trained", "Work", "make_engine"]


def make_engine(name: Literal["auto", "loop", "batched"], task: Task, federation: Federation) -> Engine:
    """The engine called `name`.

    `auto` takes Loop for convolutions on a CPU, where it is faster, and for models that cannot run as one batch of
    models (recurrent layers, branches on values); else Batched.
    """
    if name == "auto":
        slow = task.convolutional and federation.y.device.type == "cpu"
        name = "loop" if slow or not _runs_batched(task, federation) else "batched"
    return {"loop": Loop, "batched": Batched}[name](task, federation)


def _runs_batched(task: Task, federation: Federation) -> bool:
    index = torch.as_tensor(federation.part("train")[0][:4], device=federation.y.device)
    dtype = next(iter(task.params.values())).dtype
    return task.why_not_batched((federation.features(index, dtype), federation.y[index])) is None
