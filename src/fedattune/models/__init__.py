"""Models of the papers, and the user's own."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..data import Federation
from ..errors import ConfigError, ModelError, did_you_mean
from ..registry import build
from ..task import Task
from .networks import cnn, dnn, mlr

MODELS: dict[str, Callable[..., nn.Module]] = {"mlr": mlr, "dnn": dnn, "cnn": cnn}
"""name -> factory(input_shape, n_classes, *, options)."""


def make_model(
    name: str, federation: Federation, *, options: Mapping[str, Any] | None = None, seed: int = 0
) -> nn.Module:
    """Build the model `name` (of `MODELS`, or "package.module:factory") and check it on a federation's data.

    The initial weights depend on `seed` alone.

    Raises:
        ConfigError: unknown name or option.
        ModelError: the factory cannot be found or fails, or its model does not fit the data.

    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(name, federation.input_shape, federation.n_classes, options or {})
    check_model(model, federation)
    return model


def build_model(
    name: str, input_shape: tuple[int, ...], n_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build a model by name; a factory of the user's is called `factory(input_shape, n_classes, **options)`.

    A factory that takes no arguments is called without any.

    Raises:
        ConfigError: unknown name or option.
        ModelError: the factory cannot be found or fails.

    """
    if name in MODELS:
        return build(name, MODELS[name], options, input_shape, n_classes)
    factory = _import(name)
    try:
        takes_any = inspect.signature(factory).parameters
        model = factory(input_shape, n_classes, **options) if takes_any else factory()
    except Exception as error:
        raise ModelError(
            f"{name}(input_shape={input_shape}, n_classes={n_classes}) failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def check_model(model: nn.Module, federation: Federation) -> None:
    """Run the model once on two samples of the federation.

    Raises:
        ModelError: it does not fit the data.

    """
    task = Task(model)
    dtype = next((p.dtype for p in task.params.values()), torch.float32)
    device = next((p.device for p in task.params.values()), torch.device("cpu"))
    index = torch.as_tensor(federation.part("train")[0][:2])
    task.check(federation.features(index, dtype).to(device), federation.n_classes)


def _import(path: str) -> Callable[..., nn.Module]:
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(
            f"unknown model {path!r}; {did_you_mean(path, MODELS)}; "
            "a model of your own is given as package.module:factory"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's folder, as with `python -m`
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"cannot import {module_name!r} for the model {path!r}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{module_name!r} has no function {attribute!r} that makes the model")
    return factory  # type: ignore[no-any-return]
