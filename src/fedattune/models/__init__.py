"""Models of the papers, and the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import ConfigError, FedAttuneError, ModelError, did_you_mean, summarize_error
from ..core.options import build
from ..core.settings import EngineName
from ..core.task import Task
from ..data import Federation
from .architectures import cnn, digit_model, dnn, lenet, mcmahan_cnn, mlr, reddi_cnn, resnet18, tf_cnn

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlr": mlr,
    "dnn": dnn,
    "cnn": cnn,
    "lenet": lenet,
    "tf_cnn": tf_cnn,
    "mcmahan_cnn": mcmahan_cnn,
    "reddi_cnn": reddi_cnn,
    "digit_model": digit_model,
    "resnet18": resnet18,
}
"""name -> factory(input_shape, n_classes, *, options)."""


def make_model(
    name: str,
    federation: Federation,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 20,
    engine: EngineName = "auto",
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
    check_model(model, federation, batch_size=batch_size, engine=engine)
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
    factory = find_factory(name)
    try:
        if name in MODELS:
            return build(name, factory, options, input_shape, n_classes)
        takes_any = inspect.signature(factory).parameters
        model = factory(input_shape, n_classes, **options) if takes_any else factory()
    except FedAttuneError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{name}(input_shape={input_shape}, n_classes={n_classes}) failed: {summarize_error(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def check_model(
    model: nn.Module, federation: Federation, *, batch_size: int = 20, engine: EngineName = "auto"
) -> None:
    """Run the model on a batch of the federation, and one gradient step as the engine will.

    Raises:
        ModelError: it does not fit the data, or cannot be trained by this engine.
    """
    name = type(model).__name__
    if any(is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
        raise ModelError(f"the model {name} has lazy layers without a size; give them one")
    task = Task(model)
    if not task.params:
        raise ModelError(f"the model {name} has no parameters to train")
    like = next(iter(task.params.values()))
    # The smallest client: a model may need more samples than it has.
    part = federation.part("train")
    smallest = part[int(part.sizes.argmin())][:batch_size]
    index = torch.as_tensor(smallest, device=federation.y.device)
    x = federation.features(index, like.dtype).to(like.device)
    y = federation.y[index].to(like.device)
    task.check(x, federation.n_classes)
    try:
        task.gradient(task.params, task.buffers, (x, y))
    except Exception as error:
        raise ModelError(
            f"the model {name} cannot be trained on batches of {len(x)} samples: {summarize_error(error)}"
        ) from error
    if engine == "batched" and (reason := task.why_not_batched((x, y))):
        raise ModelError(
            f"the model {name} cannot be trained by the batched engine ({reason}); use --engine loop"
        )


def find_factory(path: str) -> Callable[..., nn.Module]:
    """The factory of a model of `MODELS`, or at "package.module:factory".

    Raises:
        ConfigError: unknown name.
        ModelError: the module cannot be imported or has no such function.
    """
    if path in MODELS:
        return MODELS[path]
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(
            f"unknown model {path!r}; {did_you_mean(path, MODELS)}; "
            "a model of your own is given as package.module:factory"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's folder, as with `python -m`
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"cannot import {module_name!r} for the model {path!r}: {summarize_error(error)}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{module_name!r} has no function {attribute!r} that makes the model")
    return factory  # type: ignore[no-any-return]
