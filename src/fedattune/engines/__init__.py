"""How clients are run: one at a time (Loop, the reference) or as one batch of models (Batched)."""

from typing import Literal

from ..data import Federation
from ..task import Task
from .base import Engine, Inputs, Scores, Trained
from .batched import Batched
from .loop import Loop
from .work import Work

__all__ = ["Batched", "Engine", "Inputs", "Loop", "Scores", "Trained", "Work", "make_engine"]


def make_engine(name: Literal["auto", "loop", "batched"], task: Task, federation: Federation) -> Engine:
    """The engine called `name`; `auto` takes Loop for convolutions on a CPU, where it is faster, else Batched."""
    if name == "auto":
        name = "loop" if task.convolutional and federation.y.device.type == "cpu" else "batched"
    return {"loop": Loop, "batched": Batched}[name](task, federation)
