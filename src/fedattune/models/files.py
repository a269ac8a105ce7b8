"""Personal models as files: safetensors, with what is needed to rebuild the network."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from ..algorithms import ALGORITHMS
from ..core.algorithm import Algorithm
from ..core.errors import RunError
from ..core.io import copy_tensors, load_tensors, save_tensors
from ..core.network import Network
from ..core.options import build, describe_errors, look_up
from ..core.task import trainable_params
from . import MODELS, build_model

ModelCard = Mapping[str, Any]
"""What a model's file says beside its weights.

model, model_options, algorithm, options and seed rebuild the network; input_shape, classes and client say what it is
for; schema and, of a table, preparation are how its inputs are made; input and output say what the network takes and
gives; of a network of the user's own, probe is what it gave for fixed inputs, by which changed code is noticed.
"""


CARD_KEY = "fedattune"
"""What the card is called in a file, where it is JSON."""


class _CardSchema(BaseModel):
    """The entries of a card that code relies on: files come from elsewhere."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str
    model_options: dict[str, Any]
    algorithm: str
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int
    input_shape: list[Annotated[int, Field(ge=1)]]
    classes: list[str]
    client: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    preparation: dict[str, Any] | None = None
    probe: list[list[float]] | None = None


def parse_card(text: str | None, file: Path | str) -> ModelCard:
    """The card of a model's file.

    Raises:
        RunError: the file is none of FedAttune's, or its card cannot be.

    """
    if text is None:
        raise RunError(
            f"{file} is no model that FedAttune saved; expected one that fedattune export or Result.save_models wrote"
        )
    try:
        card = json.loads(text)
        if not isinstance(card, dict):
            raise ValueError("it is no object")
        _CardSchema.model_validate(card)
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError, too
        why = "; ".join(describe_errors(error)) if isinstance(error, ValidationError) else str(error)
        raise RunError(
            f"{file} does not say what is needed to rebuild its model: {why}; export it again"
        ) from error
    return {"options": {}, **card}


def describe_model(model: nn.Module, card: ModelCard) -> ModelCard:
    """The card with what the network takes and gives."""
    kind = str(get_dtype(model)).removeprefix("torch.")
    schema, shape = card.get("schema") or {}, ", ".join(map(str, ("batch", *card["input_shape"])))
    how = "samples as they are"
    if schema.get("target"):
        how = (
            "prepared: the numbers, filled and standardised as `preparation` says, 0 and 1 for those of `flagged` that "
            "are missing, 0 and 1 for each category"
        )
    elif schema.get("shift") is not None or schema.get("scale") is not None:
        how = "prepared: (x - shift) * scale, with the constants of `schema`"
    made = f"{kind} ({shape}), {how}"
    out = f"{kind} (batch, {len(card['classes'])}), logits in the order of `classes`; softmax gives probabilities"
    probed = {} if card["model"] in MODELS else {"probe": compute_reference_logits(model, card)}
    return {**card, "input": made, "output": out, **probed}


def compute_reference_logits(model: nn.Module, card: ModelCard) -> list[list[float]] | None:
    """The logits of two inputs that are always the same, (2, classes); None if the network cannot say."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *card["input_shape"], generator=generator, dtype=get_dtype(model))
    try:
        with torch.no_grad():
            logits = model(x).double()
    except Exception:  # of code that we do not know, and no reason to lose a model
        return None
    found: list[list[float]] | None = logits.tolist() if bool(logits.isfinite().all()) else None
    return found


def check_reference_logits(
    model: nn.Module, card: ModelCard, before: list[list[float]] | None, file: Path | str
) -> None:
    """Refuse a network that gives something else than it did when it was trained.

    Raises:
        RunError: it does.

    """
    now = None if before is None else compute_reference_logits(model, card)
    if before is None or now is None:
        return
    old, new = torch.tensor(before), torch.tensor(now)
    if old.shape != new.shape or not torch.allclose(old, new, rtol=1e-3, atol=1e-3 * float(old.abs().max())):
        raise RunError(
            f"{file}: the network {card['model']} gives other outputs than when it was trained, so its code, or what "
            "that depends on, has changed since; take the code of that time, or train again"
        )


def get_dtype(model: nn.Module) -> torch.dtype:
    """The type of the model's floating-point weights, which is that of its inputs."""
    found: torch.dtype = next(v.dtype for v in model.state_dict().values() if v.is_floating_point())
    return found


def save_model(file: Path, model: nn.Module, card: ModelCard) -> None:
    """Write a model and what is needed to rebuild and use it."""
    save_tensors(file, copy_tensors(model.state_dict()), {CARD_KEY: json.dumps(describe_model(model, card))})


def load_model(file: Path | str, module: nn.Module | None = None, *, factory: str | None = None) -> nn.Module:
    """Read a client's model that `Result.save_models` or `fedattune export` wrote as safetensors.

    Args:
        file: the safetensors file.
        module: a model of the same architecture to fill; needed for a module of the user's own.
        factory: the "package.module:factory" that the model was trained with; it runs only where it is named here,
            and not because a file names it.

    Raises:
        RunError: the file cannot be read, or its model cannot be rebuilt without `module` or `factory`.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> files = fedattune.fit("local", data, rounds=1).save_models("models")
        >>> [file.name for file in files]
        ['0000-0.safetensors', '0001-1.safetensors', '0002-2.safetensors', '0003-3.safetensors']
        >>> load_model(files[0])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])

    """
    return read_model(Path(file), module, factory)[0]


def read_model(file: Path, module: nn.Module | None, factory: str | None) -> tuple[nn.Module, ModelCard]:
    """The model of a file, and its card; for the arguments and errors see `load_model`."""
    state, meta = load_tensors(file)
    card = parse_card(meta.get(CARD_KEY), file)
    if module is None and ":" in card["model"]:
        module = _rebuild_users_model(file, card, factory)
    model = fill_model(module, state, card)
    check_reference_logits(model, card, card.get("probe"), file)
    return model, card


def _rebuild_users_model(file: Path, card: ModelCard, factory: str | None) -> nn.Module:
    """The network of the user's own factory, which must be named by the user, too."""
    if factory is None or factory != card["model"]:
        raise RunError(
            f"{file} was trained with {card['model']!r}, which is code of somebody's own and is not run because a file "
            f"names it; if it is yours, say so by factory={card['model']!r} (--factory {card['model']}), or export the "
            "model as onnx"
        )
    return rebuild_model(card)


def fill_model(module: nn.Module | None, state: Mapping[str, Tensor], card: ModelCard) -> nn.Module:
    """A copy of `module` (or a network built from the card) with the weights `state`, in evaluation mode.

    A method that changes the model is followed: its network is built from the module.

    Raises:
        RunError: no module was given and the card names none, or the weights do not fit.

    """
    module = rebuild_model(card) if module is None else module
    network = build_algorithm(card).network if card["algorithm"] in ALGORITHMS else None
    if network and not state.keys() <= {**dict(module.named_parameters()), **module.state_dict()}.keys():
        module = wrap_model(network, module, torch.zeros(2, *card["input_shape"]), card["seed"])
    dtype = next((v.dtype for v in state.values() if v.is_floating_point()), torch.float32)
    filled = copy.deepcopy(module).to("cpu", dtype)
    places = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    # A saved state also names tied weights a second time.
    unknown = sorted(state.keys() - places.keys() - filled.state_dict().keys())
    missing = sorted(trainable_params(filled).keys() - state.keys())
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


def rebuild_model(card: ModelCard) -> nn.Module:
    """The run's model with its initial weights, before any method changed it.

    Raises:
        RunError: it was a module of the user's own.

    """
    if not is_rebuildable(card):
        raise RunError(f"the run's model was a {card['model']} of your own; give one as `module` to fill")
    with torch.random.fork_rng():
        torch.manual_seed(card["seed"])  # also for frozen parameters, which are no part of a saved model
        return build_model(
            card["model"], tuple(card["input_shape"]), len(card["classes"]), card["model_options"]
        )


def is_rebuildable(card: ModelCard) -> bool:
    """Whether the run's model was given by name, so that it can be built again."""
    return card["model"] in MODELS or ":" in card["model"]


def build_algorithm(card: ModelCard) -> Algorithm:
    """The method of a run, from its name and options.

    Raises:
        ConfigError: it is none of the known ones.

    """
    name = card["algorithm"]
    return build(name, look_up("algorithm", name, ALGORITHMS), card.get("options", {}))


def wrap_model(network: Network, module: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """What a method trains in place of the module; x (B, ...) are inputs, and `seed` draws its new weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return network.wrap(copy.deepcopy(module), x)
