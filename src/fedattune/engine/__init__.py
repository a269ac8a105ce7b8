"""Run clients one at a time (`SequentialEngine`, the reference) or as one batch of models (`VectorizedEngine`)."""

import warnings
from typing import Literal

import torch

from ..core.errors import ModelError
from ..core.payload import Batch
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
    clip: float | None = None,
) -> Engine:
    """Make the engine for a run.

    `auto` and the actors of `ray` run clients as one batch of models. They run one client after the other on every core
    for convolutions and pretrained networks on a CPU, where this is faster. They do the same with models that cannot
    run as one batch, such as models with recurrent layers of PyTorch, branches on values, or operations without a rule
    for `torch.func.vmap`. Steps are compiled if a client takes MIN_COMPILED_STEPS of them until the process ends.
    Models without a gradient inside `torch.func`, such as those with checkpointed layers, run in the sequential engine.
    `clip` is the norm of the gradients of single rows, with differential privacy of rows.

    Raises:
        ModelError: the vectorized engine cannot train the model with mixed precision.
    """
    batch = _take_batch(task, federation)
    task.inspect(batch[0])
    if name == "sequential":
        return SequentialEngine(task, federation)
    # `check_model` has tried the usual precision; what the coarser one can do depends on the device.
    if name == "vectorized" and task.mixed_precision and (reason := task.find_vectorization_error(batch, clip)):
        raise ModelError(
            f"the model {type(task.model).__name__} cannot be trained by the vectorized engine with mixed precision "
            f"({reason}); use --engine auto"
        )
    slow = task.is_fastest_alone and federation.y.device.type == "cpu"
    is_serial = name != "vectorized" and (slow or _find_obstacle(task, batch, clip) is not None)
    if is_serial and task.find_gradient_error(batch, clip) is not None:
        return SequentialEngine(task, federation)
    separate = steps * (cohort_size if is_serial else 1)
    return VectorizedEngine(task, federation, is_serial=is_serial, should_compile=separate >= MIN_COMPILED_STEPS)


def _find_obstacle(task: Task, batch: Batch, clip: float | None) -> str | None:
    """Return why models are not trained as one batch, or None; where PyTorch would loop over them, it warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop", UserWarning)
        return task.find_vectorization_error(batch, clip)


def _take_batch(task: Task, federation: Federation) -> Batch:
    samples = next(rows for rows in federation.part("train") if len(rows))
    index = torch.as_tensor(samples[:4], device=federation.y.device)
    dtype = next(iter(task.params.values())).dtype
    return federation.features(index, dtype), federation.y[index]
