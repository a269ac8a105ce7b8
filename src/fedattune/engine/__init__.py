"""Run clients one at a time (`SequentialEngine`, the reference) or as one batch of models (`VectorizedEngine`)."""

from typing import Literal

import torch

from ..core.task import Task
from ..data import Federation
from .base import Engine
from .sequential import SequentialEngine
from .vectorized import VectorizedEngine

MIN_COMPILED_STEPS = 64
"""Steps of a run from which compiling pays: to compile a step takes about as long as 40 eager steps.

Both are work of Python's interpreter, so their ratio depends little on the processor.
"""


def make_engine(
    name: Literal["auto", "sequential", "vectorized", "ray"],
    task: Task,
    federation: Federation,
    *,
    steps: int = MIN_COMPILED_STEPS,
    cohort_size: int = 1,
) -> Engine:
    """Make the engine for a run.

    `auto` and the actors of `ray` run clients as one batch of models. They run one client after the other on every core
    for convolutions and pretrained networks on a CPU, where this is faster. They do the same with models that cannot
    run as one batch, such as models with recurrent layers of PyTorch or branches on values. Steps are compiled if a
    client takes MIN_COMPILED_STEPS of them until the process ends.
    """
    if name == "sequential":
        return SequentialEngine(task, federation)
    slow = task.is_fastest_alone and federation.y.device.type == "cpu"
    is_serial = name != "vectorized" and (slow or not _supports_batching(task, federation))
    separate = steps * (cohort_size if is_serial else 1)
    return VectorizedEngine(task, federation, is_serial=is_serial, should_compile=separate >= MIN_COMPILED_STEPS)


def _supports_batching(task: Task, federation: Federation) -> bool:
    samples = next(rows for rows in federation.part("train") if len(rows))
    index = torch.as_tensor(samples[:4], device=federation.y.device)
    dtype = next(iter(task.params.values())).dtype
    return task.find_vectorization_error((federation.features(index, dtype), federation.y[index])) is None
