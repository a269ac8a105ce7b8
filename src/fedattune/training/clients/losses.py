"""Check that a method and an engine can train on the chosen loss."""

import torch
from torch import nn

from ...core.algorithm import Algorithm
from ...core.errors import ConfigError
from ...core.losses import make_loss
from ...core.own_code import is_reference
from ...core.settings import Settings
from ...core.task import Task
from ...data import Federation
from ...data.federated import FederationInfo


def check_loss(
    algorithm: Algorithm, module: nn.Module, settings: Settings, federation: Federation | FederationInfo
) -> None:
    """Check that classes are not balanced twice, and that the engine can differentiate a custom loss."""
    balance = algorithm.network.balance if algorithm.network else None
    if balance and (corrections := settings.loss.corrections):
        key, value = next(iter(corrections.items()))
        raise ConfigError(f"{key}: got {value}, and {balance} corrects for class counts already; leave it out")
    if not is_reference(settings.loss.name) or not isinstance(federation, Federation):
        return
    loss = make_loss(settings.loss, federation.classes, federation.kind, federation.output_shape)
    task, engine = Task(module, loss=loss), settings.execution.engine
    rows = next((rows for rows in federation.part("train") if len(rows)), None)
    if rows is None:
        return
    index = torch.as_tensor(rows[:4], device=federation.device)
    like = next(iter(task.params.values()))
    batch = federation.features(index, like.dtype).to(like.device), federation.y[index].to(like.device)
    if reason := task.find_gradient_error(batch, is_eager=True):
        raise ConfigError(f"loss: {settings.loss.name} has no gradient on a batch of 4 rows or fewer: {reason}")
    if engine == "vectorized" and (reason := task.find_vectorization_error(batch)):
        raise ConfigError(
            f"loss: {settings.loss.name} cannot be used by the vectorized engine ({reason}); use --engine auto"
        )
