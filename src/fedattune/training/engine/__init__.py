"""How clients are run: one at a time (Loop, the reference) or as one batch of models (Batched)."""

from typing import Literal

import torch

from ...core.task import Task
from ...data import Federation
from .base import ClientInputs, ClientOutputs, Engine, EvalPart, Scores
from .batches import LocalTraining
from .sequential import SequentialEngine
from .vectorized import VectorizedEngine

__all__ = [
    "ClientInputs",
    "ClientOutputs",
    "Engine",
    "EvalPart",
    "LocalTraining",
    "Scores",
    "SequentialEngine",
    "VectorizedEngine",
    "make_engine",
]

MIN_RECORDED_STEPS = 64
"""Steps of a run from which on recording them pays: it takes about as long as 40 that are not recorded."""


def make_engine(
    name: Literal["auto", "loop", "batched", "ray"],
    task: Task,
    federation: Federation,
    *,
    steps: int = MIN_RECORDED_STEPS,
    cohort: int = 1,
) -> Engine:
    """The engine called `name`, for a run of so many local `steps` in all by each of the `cohort` clients of a round.

    `auto` runs clients as one batch of models; for convolutions on a CPU, which are faster so, and for models that
    cannot run as one batch (recurrent layers, branches on values), one client after the other on every core. So do
    actors of `ray`.
    """
    if name == "loop":
        return SequentialEngine(task, federation)
    slow = task.convolutional and federation.y.device.type == "cpu"
    single = name != "batched" and (slow or not _supports_batching(task, federation))
    separate = steps * (cohort if single else 1)
    return VectorizedEngine(task, federation, single=single, recording=separate >= MIN_RECORDED_STEPS)


def _supports_batching(task: Task, federation: Federation) -> bool:
    some = next(rows for rows in federation.part("train") if len(rows))
    index = torch.as_tensor(some[:4], device=federation.y.device)
    dtype = next(iter(task.params.values())).dtype
    return task.why_not_batched((federation.features(index, dtype), federation.y[index])) is None
