"""Personal models as files: safetensors, with what is needed to rebuild the network."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .algorithms import ALGORITHMS
from .core import Algorithm
from .errors import RunError
from .models import MODELS, build_model
from .network import Network
from .registry import build, lookup
from .runs import load_tensors, save_tensors
from .task import trainable

Card = Mapping[str, Any]
"""model, model_options, input_shape, classes, and whose model it is."""


def save_model(file: Path, model: nn.Module, card: Card) -> None:
    """Write a model and what is needed to rebuild it."""
    save_tensors(file, model.state_dict(), {"fedattune": json.dumps(card)})


def load_model(file: Path | str, module: nn.Module | None = None) -> nn.Module:
    """Read a client's model that `Result.save_models` wrote.

    Args:
        file: the safetensors file.
        module: a model of the same architecture to fill; needed for a module of the user's own.

    Raises:
        RunError: the file cannot be read, or its model cannot be rebuilt without `module`.

    """
    state, meta = load_tensors(Path(file))
    if "fedattune" not in meta:
        raise RunError(f"{file} is no model that FedAttune saved; expected one that Result.save_models wrote")
    return fill(module, state, json.loads(meta["fedattune"]))


def fill(module: nn.Module | None, state: Mapping[str, Tensor], card: Card) -> nn.Module:
    """A copy of `module` (or a network built from the card) with the weights `state`, in evaluation mode.

    A method that changes the model is followed: its network is built from the module.

    Raises:
        RunError: no module was given and the card names none, or the weights do not fit.

    """
    module = rebuilt(card) if module is None else module
    network = algorithm_of(card).network if card["algorithm"] in ALGORITHMS else None
    if network and not state.keys() <= {**dict(module.named_parameters()), **module.state_dict()}.keys():
        module = wrapped(network, module, torch.zeros(2, *card["input_shape"]), card["seed"])
    dtype = next(v.dtype for v in state.values() if v.is_floating_point())
    filled = copy.deepcopy(module).to("cpu", dtype)
    places = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    # A saved state also names tied weights a second time.
    unknown = sorted(state.keys() - places.keys() - filled.state_dict().keys())
    missing = sorted(trainable(filled).keys() - state.keys())
    shapes = sorted(k for k in state.keys() & places.keys() if state[k].shape != places[k].shape)
    if unknown or missing or shapes:
        raise RunError(
            "the model does not fit the saved one: "
            f"tensors unknown to it {unknown}, missing {missing}, of another shape {shapes}"
        )
    with torch.no_grad():
        for name in state.keys() & places.keys():
            places[name].copy_(state[name])
    return filled.eval()


def rebuilt(card: Card) -> nn.Module:
    """The run's model with its initial weights, before any method changed it.

    Raises:
        RunError: it was a module of the user's own.

    """
    if card["model"] not in MODELS and ":" not in card["model"]:
        raise RunError(f"the run's model was a {card['model']} of your own; give one as `module` to fill")
    with torch.random.fork_rng():
        torch.manual_seed(card["seed"])  # also for frozen parameters, which are no part of a saved model
        return build_model(
            card["model"], tuple(card["input_shape"]), len(card["classes"]), card["model_options"]
        )


def algorithm_of(card: Card) -> Algorithm:
    """The method of a run, from its name and options.

    Raises:
        ConfigError: it is none of the known ones.

    """
    name = card["algorithm"]
    return build(name, lookup("algorithm", name, ALGORITHMS), card.get("options", {}))


def wrapped(network: Network, module: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """What a method trains in place of the module; x (B, ...) are inputs, and `seed` draws its new weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return network.wrap(copy.deepcopy(module), x)
