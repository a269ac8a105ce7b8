"""Personal models as files: safetensors, with what is needed to rebuild the network."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import RunError
from .models import MODELS, build_model
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

    Raises:
        RunError: no module was given and the card names none, or the weights do not fit.

    """
    if module is None:
        if card["model"] not in MODELS and ":" not in card["model"]:
            raise RunError(f"the run's model was a {card['model']} of your own; give one as `module` to fill")
        with torch.random.fork_rng():
            torch.manual_seed(card["seed"])  # frozen parameters are those of the run
            module = build_model(
                card["model"], tuple(card["input_shape"]), len(card["classes"]), card["model_options"]
            )
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
