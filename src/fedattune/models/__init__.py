"""Build the papers' models by name, and custom models by `file.py:factory` or `package.module:factory`."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import ConfigError, FedAttuneError, ModelError, did_you_mean, list_some, summarize_error
from ..core.hardware import seed_rng
from ..core.options import build
from ..core.own_code import is_reference, load_function
from ..core.settings import EngineName
from ..core.task import Task
from ..data import Federation
from ..data.schema import Schema
from .architectures import char_lstm, cnn, digit_model, dnn, gam, lenet, mcmahan_cnn, mlr, reddi_cnn, resnet18, tf_cnn
from .inputs import suit_inputs, take_extremes
from .pretrained import PretrainedNetwork, hf

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlr": mlr,
    "gam": gam,
    "dnn": dnn,
    "cnn": cnn,
    "lenet": lenet,
    "tf_cnn": tf_cnn,
    "mcmahan_cnn": mcmahan_cnn,
    "reddi_cnn": reddi_cnn,
    "digit_model": digit_model,
    "resnet18": resnet18,
    "char_lstm": char_lstm,
    "hf": hf,
}
"""Name -> factory(input_shape, n_classes, *, options)."""


MAX_LISTED = 5
"""Clients or tensors that a message names."""


_COMPUTING_HOOKS = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}
"""Hooks of PyTorch that keep a computed weight in the module, and their names."""


def has_outside_parts(name: str) -> bool:
    """Tell whether a model depends on more than this package: on the user's code, or on a pretrained network."""
    return name not in MODELS or name == "hf"


def complete_options(name: str, options: Mapping[str, Any], schema: Schema | None) -> Mapping[str, Any]:
    """Add to a model's options what a table says of its inputs, unless it is given: how many are numbers."""
    if name != "gam" or schema is None or not schema.columns:
        return options
    return {"numbers": len(schema.numbers), **options}


def make_model(
    name: str,
    federation: Federation,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 20,
    engine: EngineName = "auto",
    clip: float | None = None,
) -> nn.Module:
    """Build a model by name, with its initial weights, and check it on a federation's data; see `build_model`.

    Raises:
        ConfigError: the name or an option is unknown.
        ModelError: the factory is missing or fails, or the model does not fit the data.
    """
    model = build_seeded_model(name, federation, options=options, seed=seed)
    check_model(model, federation, batch_size=batch_size, engine=engine, clip=clip)
    return model


def build_seeded_model(
    name: str, federation: Federation, *, options: Mapping[str, Any] | None = None, seed: int = 0
) -> nn.Module:
    """Build a model by name, with initial weights that depend on `seed` alone; see `make_model`, which checks it."""
    with seed_rng(seed):
        return build_model(name, federation.input_shape, federation.n_outputs, options or {})


def build_model(name: str, input_shape: tuple[int, ...], n_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a model by name.

    Args:
        name: a name of `MODELS`, "file.py:factory", or "package.module:factory".
        n_classes: number of outputs: of classes, labels or numbers.
        options: keywords of the factory. A user's factory without parameters is called without arguments.

    Raises:
        ConfigError: the name or an option is unknown.
        ModelError: the factory is missing or fails.
    """
    factory = find_factory(name)
    try:
        if name in MODELS:
            return build(name, factory, options, input_shape, n_classes)
        parameters = inspect.signature(factory).parameters
        model = factory(input_shape, n_classes, **options) if parameters else factory()
    except FedAttuneError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{name}(input_shape={input_shape}, n_classes={n_classes}) failed: {summarize_error(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def copy_module(model: nn.Module) -> nn.Module:
    """Copy a custom module.

    Raises:
        ModelError: it holds something that cannot be copied.
    """
    cannot = f"the model {type(model).__name__} cannot be copied, and every client needs a copy"
    for hook in (hook for module in model.modules() for hook in module._forward_pre_hooks.values()):
        if (name := _COMPUTING_HOOKS.get(type(hook).__name__)) is not None:  # its result is no leaf after a gradient
            raise ModelError(f"{cannot}: it uses torch.nn.utils.{name}; use torch.nn.utils.parametrizations.{name}")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{cannot}: keep no computed tensors, locks or open files in it ({summarize_error(error)})"
        ) from error


def check_model(
    model: nn.Module,
    federation: Federation,
    *,
    batch_size: int = 20,
    engine: EngineName = "auto",
    clip: float | None = None,
) -> None:
    """Run the model on one batch of the federation, with the gradient that the engine will compute.

    Args:
        batch_size: samples in the batch; the smallest client may have fewer.
        clip: norm to which the gradients of single samples are clipped, with differential privacy of rows.

    Raises:
        ModelError: the model does not fit the data, or this engine cannot train the model.
    """
    name = type(model).__name__
    if any(is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
        raise ModelError(f"the model {name} has lazy layers without a size; give them one")
    if names := [key for key, t in (*model.named_parameters(), *model.named_buffers()) if t.is_complex()]:
        raise ModelError(
            f"the model {name} has complex tensors: {list_some(names, MAX_LISTED)}; expected real ones; keep "
            "torch.view_as_real(tensor) in it, and call torch.view_as_complex in its forward"
        )
    task = Task(model)
    if not task.params:
        raise ModelError(f"the model {name} has no parameters to train")
    like = next(iter(task.params.values()))
    # The smallest client: a model may need more samples than it has.
    part = federation.part("train")
    smallest = part[int(part.sizes.argmin())][:batch_size]
    index = torch.as_tensor(smallest, device=federation.y.device)
    federation = suit_inputs(federation, model)
    x = federation.features(index, like.dtype).to(like.device)
    y = federation.y[index].to(like.device)
    if isinstance(model, PretrainedNetwork):
        model.check_inputs(x)
    whole = [] if x.is_floating_point() else [take_extremes(federation).to(x)]
    task.check(torch.cat([x, *whole]), federation.output_shape, federation.kind)
    # A model without the gradient of other engines may train in the sequential one.
    modes = (True,) if engine == "sequential" else (False, True)
    errors = [task.find_gradient_error((x, y), is_eager=is_eager) for is_eager in modes]
    if all(errors):
        if len(x) == 1 < batch_size and task.has_batch_statistics:
            single = [federation.names[i] for i in (part.sizes == 1).nonzero()[0]]
            raise ModelError(
                f"the model {name} normalizes over a batch of rows (BatchNorm), and {len(single):,} "
                f"client{'s have' if len(single) > 1 else ' has'} a single training row: "
                f"{list_some(single, MAX_LISTED)}; leave out small clients (--min-rows 5, min_rows=5), or use a model "
                "without BatchNorm"
            )
        raise ModelError(f"the model {name} cannot be trained on batches of {len(x)} samples: {errors[-1]}")
    if engine == "vectorized" and (reason := task.find_vectorization_error((x, y), clip)):
        raise ModelError(f"the model {name} cannot be trained by the vectorized engine ({reason}); use --engine auto")


def find_factory(path: str) -> Callable[..., nn.Module]:
    """Return the factory of a name of `MODELS`, or the function at "file.py:factory" or "package.module:factory".

    Raises:
        ConfigError: the name is unknown.
        ModelError: the module cannot be imported, or has no such function.
    """
    if path in MODELS:
        return MODELS[path]
    if not is_reference(path):
        raise ConfigError(
            f"unknown model {path!r}; {did_you_mean(path, MODELS)}; "
            "name a model of your own as file.py:factory or package.module:factory"
        )
    return load_function(path, "the model", ModelError)
