"""Write personal models to safetensors files, with a card that says how to rebuild and use the network."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from ..algorithms import ALGORITHMS
from ..algorithms.own import build_method
from ..core.algorithm import Algorithm
from ..core.errors import RunError
from ..core.hardware import seed_rng
from ..core.io import copy_tensors, load_tensors, save_tensors
from ..core.network import MethodModule, Network
from ..core.options import describe_errors
from ..core.own_code import is_reference, make_portable
from ..core.targets import TargetKind
from ..core.task import trainable_params
from . import MODELS, build_model, has_outside_parts

Logits = list[list[float]]
ModelCard = Mapping[str, Any]
"""The description of a model that its file holds beside the weights.

To rebuild the network: model, model_options, algorithm, options, seed. Its purpose: input_shape, classes, client. To
prepare inputs: schema and, for a table, preparation. For the reader: dtype, input, output. For a custom
or pretrained network, reference_logits: its outputs for fixed inputs, which reveal that it has changed.
"""

CARD_KEY = "fedattune"
"""The key of the card in a file, as JSON."""
SOURCE_KEY = "algorithm_source"
"""Key of a run's configuration with the reference to a custom method. A card in a file never has it."""


class _CardSchema(BaseModel):
    """The entries of a card that code relies on. Files may come from strangers."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str
    model_options: dict[str, Any]
    algorithm: str
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int
    input_shape: list[Annotated[int, Field(ge=1)]]
    classes: list[str]
    target_kind: TargetKind | None = None
    target_names: list[str] = Field(default_factory=list)
    client: str = ""
    dtype: Literal["float32", "float64"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    preparation: dict[str, Any] | None = None
    reference_logits: Logits | None = None


def parse_card(text: str | None, file: Path | str) -> ModelCard:
    """Read the card of a model's file."""
    if text is None:
        raise RunError(
            f"{file} is no model that FedAttune saved; expected one that fedattune export or Result.save_models wrote"
        )
    try:
        card = json.loads(text)
        if not isinstance(card, dict):
            raise ValueError("its card is no JSON object")
        _CardSchema.model_validate(card)
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError, too
        why = "; ".join(describe_errors(error)) if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{file} lacks the description of its model: {why}; export it again") from error
    return {"options": {}, **card}


def check_preparation(card: ModelCard, source: str) -> None:
    """Refuse a card without the preparation of inputs, because predictions would be wrong."""
    schema = card.get("schema")
    if schema is None or (schema.get("numbers") and card.get("preparation") is None):
        raise RunError(
            f"{source} does not say how inputs are prepared, so its model cannot be used on new data; train it again"
        )


def describe_model(model: nn.Module, card: ModelCard) -> ModelCard:
    """Return the card with the inputs and outputs of the network."""
    dtype = str(get_dtype(model)).removeprefix("torch.")
    input_type = dtype if get_integer_type(card) is None else "int64"
    schema, shape = card.get("schema") or {}, ", ".join(map(str, ("batch", *card["input_shape"])))
    n, names = count_outputs(card), ", ".join(card.get("target_names", []))
    restored = f"output * {schema.get('target_deviation')} + {schema.get('target_mean')}"
    outputs: dict[TargetKind, str] = {
        "class": f"(batch, {n}), logits in the order of `classes`; softmax gives probabilities",
        "number": f"(batch, {n}); {restored} is the prediction in the unit of the target",
        "labels": f"(batch, {n}), logits of {names}; sigmoid gives probabilities",
        "numbers": f"(batch, {n}); {restored} are {names} in their units",
        "positions": f"(batch, {n}, positions), logits in the order of `classes` at each position",
    }
    preparation = "samples as they are"
    if tokens := schema.get("tokens"):
        (column, tokenizer), *_ = tokens.items()
        preparation = f"token numbers of the text {column!r} by {tokenizer}, -1 where there is no token"
    elif schema.get("target"):
        preparation = (
            "prepared: the numbers, filled and standardised with `preparation`; 0 or 1 for each missing number of "
            "`flagged`; 0 or 1 for each category"
        )
    elif schema.get("shift") is not None or schema.get("scale") is not None:
        preparation = "prepared: (x - shift) * scale, with the constants of `schema`"
    return {
        **card,
        "dtype": dtype,
        "input": f"{input_type} ({shape}), {preparation}",
        "output": f"{dtype} {outputs[get_kind(card)]}",
        **({"reference_logits": compute_reference_logits(model, card)} if has_outside_parts(card["model"]) else {}),
    }


def compute_reference_logits(model: nn.Module, card: ModelCard) -> Logits | None:
    """Compute the logits of two fixed inputs, flat (2, outputs); None if the network fails or they are not finite."""
    x = draw_inputs(model, card, 2, torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            logits = model(x).double().flatten(1)
    except Exception:  # a user's code may fail here; its model is worth keeping
        return None
    return cast(Logits, logits.tolist()) if bool(logits.isfinite().all()) else None


def draw_inputs(model: nn.Module, card: ModelCard, n: int, generator: torch.Generator) -> Tensor:
    """Draw n inputs (n, ...) that the network can take: token numbers if it has a vocabulary, else normal numbers.

    A custom network may look up numbers in a table, which these miss: it gets small numbers of that table, or zeros.
    """
    # The first inputs never change, because files hold the outputs of older versions for them.
    x = _draw_usual_inputs(model, card, n, generator)
    if card["model"] in MODELS or _takes(model, x):
        return x
    sizes = [size for m in model.modules() if isinstance(size := getattr(m, "num_embeddings", None), int)]
    half = max(1, min(sizes, default=1) // 2)  # the network may add to the numbers, such as 1 for the padding's -1
    tokens = torch.randint(0, half, x.shape, generator=generator).to(x.dtype)
    return next((one for one in (tokens, torch.zeros_like(x)) if _takes(model, one)), x)


def _takes(model: nn.Module, x: Tensor) -> bool:
    """Tell whether a network in evaluation mode takes these inputs."""
    try:
        with torch.no_grad():
            model(x.clone())  # it may write over them
    except Exception:  # code of a user raises anything
        return False
    return True


def _draw_usual_inputs(model: nn.Module, card: ModelCard, n: int, generator: torch.Generator) -> Tensor:
    shape, integer = (n, *card["input_shape"]), get_integer_type(card)
    names = ("vocabulary",) if integer is None else ("vocabulary", "num_embeddings")
    sizes = [getattr(m, name, None) for m in model.modules() for name in names]
    vocabularies = [size for size in sizes if isinstance(size, int)]
    if integer is not None:  # 0 is a token of every vocabulary
        return torch.randint(0, min(vocabularies, default=1), shape, generator=generator, dtype=integer)
    if vocabularies:
        return torch.randint(0, min(vocabularies), shape, generator=generator).to(get_dtype(model))
    return torch.randn(*shape, generator=generator, dtype=get_dtype(model))


def get_integer_type(card: ModelCard) -> torch.dtype | None:
    """Return the type of inputs that are whole numbers; None for inputs of the type of the weights."""
    return torch.int64 if (card.get("schema") or {}).get("input_type") == "int64" else None


def make_zero_inputs(card: ModelCard, n: int) -> Tensor:
    """Return inputs (n, ...) of zeros."""
    return torch.zeros(n, *card["input_shape"], dtype=get_integer_type(card))


def check_reference_logits(model: nn.Module, card: ModelCard, before: Logits | None, file: Path | str) -> None:
    """Refuse a network whose outputs were `before` (2, classes) in training, and have changed; None accepts any."""
    if before is None or (now := compute_reference_logits(model, card)) is None:
        return
    old, new = torch.tensor(before), torch.tensor(now)
    if old.shape != new.shape or not torch.allclose(old, new, rtol=1e-3, atol=1e-3 * float(old.abs().max())):
        raise RunError(
            f"{file}: the network {card['model']} gives other outputs than when it was trained, so its code or a "
            "dependency has changed since; use the code of that time, or train again"
        )


def get_kind(card: ModelCard) -> TargetKind:
    """Return what the network of a card predicts."""
    return cast(TargetKind, card.get("target_kind", "class" if card["classes"] else "number"))


def count_outputs(card: ModelCard) -> int:
    """Return the number of outputs of the network of a card, or of those at each position."""
    return len(card["classes"] or card.get("target_names", ())) or 1


def get_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the floating-point weights, which is also the type of inputs that are no whole numbers."""
    return cast(torch.dtype, next(v.dtype for v in model.state_dict().values() if v.is_floating_point()))


def save_model(file: Path, model: nn.Module, card: ModelCard) -> None:
    """Write a model and its card. The card rebuilds the frozen weights of a built-in model, so they are left out."""
    named = model.named_parameters(remove_duplicate=False) if card["model"] in MODELS else ()
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    state = {name: value for name, value in model.state_dict().items() if name not in frozen}
    save_tensors(file, copy_tensors(state), {CARD_KEY: json.dumps(describe_model(model, card))})


def load_model(file: Path | str, module: nn.Module | None = None, *, factory: str | None = None) -> nn.Module:
    """Read a client's model that `Result.save_models` or `fedattune export` wrote as safetensors.

    Args:
        file: the safetensors file.
        module: a model of the same architecture to fill; needed for a module of your own.
        factory: the "file.py:factory" or "package.module:factory" that the model was trained with. FedAttune runs the
            factory only if you name it here; the name in the file is not enough.

    Returns:
        The model in evaluation mode.

    Raises:
        RunError: the file cannot be read, or its model cannot be rebuilt without `module` or `factory`.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> files = fedattune.fit(data, "local", rounds=1).save_models("models")
        >>> [file.name for file in files]
        ['0000-0.safetensors', '0001-1.safetensors', '0002-2.safetensors', '0003-3.safetensors']
        >>> load_model(files[0])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    return read_model(Path(file), module, factory)[0]


def read_model(file: Path, module: nn.Module | None, factory: str | None) -> tuple[nn.Module, ModelCard]:
    """Read a model and its card; see `load_model` for arguments and errors."""
    state, meta = load_tensors(file)
    card: ModelCard = {k: v for k, v in parse_card(meta.get(CARD_KEY), file).items() if k != SOURCE_KEY}
    if module is None:
        card = confirm_code(card, factory, file, otherwise=", or export the model as onnx")
    model = fill_model(module, state, card)
    check_reference_logits(model, card, card.get("reference_logits"), file)
    return model, card


def confirm_code(card: ModelCard, factory: str | None, where: Path | str, *, otherwise: str = "") -> ModelCard:
    """Return the card of a model whose code may run: FedAttune's, or custom code that the user names as `factory`.

    `otherwise` ends the message with another way out.
    """
    if not is_reference(card["model"]):
        return card
    name = make_portable(card["model"])
    if factory is None or make_portable(factory) != name:
        raise RunError(
            f"{where} was trained with {name!r}, which is code of somebody's own and is not run because a file "
            f"names it; if it is yours, say so by factory={name!r} (--factory {name}){otherwise}"
        )
    return {**card, "model": factory}  # the user's path, not the path in the file


def fill_model(module: nn.Module | None, state: Mapping[str, Tensor], card: ModelCard) -> nn.Module:
    """Fill a copy of a module (None: of the card's module) with weights, in evaluation mode.

    A method that changes the model changes the copy, too.
    """
    module = rebuild_model(card) if module is None else module
    is_known = card["algorithm"] in ALGORITHMS or SOURCE_KEY in card
    network = build_algorithm(card).network if is_known else None
    if network and not state.keys() <= {**dict(module.named_parameters()), **module.state_dict()}.keys():
        module = copy.deepcopy(module).to("cpu")
        module = wrap_model(network, module, make_zero_inputs(card, 2), card["seed"], get_kind(card))
    dtype = next((v.dtype for v in state.values() if v.is_floating_point()), torch.float32)
    filled = copy.deepcopy(module).to("cpu", dtype)
    targets = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    # A saved state also names tied weights a second time.
    unknown = sorted(state.keys() - targets.keys() - filled.state_dict().keys())
    missing = sorted(trainable_params(filled).keys() - state.keys())
    shapes = sorted(k for k in state.keys() & targets.keys() if state[k].shape != targets[k].shape)
    if unknown or missing or shapes:
        raise RunError(
            "the model does not fit the saved one: "
            f"tensors unknown to it {unknown}, missing {missing}, of another shape {shapes}"
        )
    with torch.no_grad():
        for name in state.keys() & targets.keys():
            targets[name].copy_(state[name])
    return filled.eval()


def rebuild_model(card: ModelCard) -> nn.Module:
    """Build the run's model with its initial weights, as it was before any method changed it."""
    if not is_rebuildable(card):
        raise RunError(f"the run's model was a {card['model']} of your own; give one as `module` to fill")
    with seed_rng(card["seed"]):  # also for frozen parameters, which are no part of a saved model
        return build_model(card["model"], tuple(card["input_shape"]), count_outputs(card), card["model_options"])


def is_rebuildable(card: ModelCard) -> bool:
    """Tell if the run's model had a name, so that it can be built again."""
    return card["model"] in MODELS or is_reference(card["model"])


def build_algorithm(card: ModelCard) -> Algorithm:
    """Build the method of a run from its name, or the reference to a custom factory, and its options."""
    return build_method(card.get(SOURCE_KEY, card["algorithm"]), card.get("options", {}))


def wrap_model(network: Network, module: nn.Module, x: Tensor, seed: int, kind: TargetKind = "class") -> nn.Module:
    """Return the module that a method trains on inputs x (B, ...) in place of the user's module.

    `kind` is the kind of the target, which tells the module how to join its predictions.
    """
    with seed_rng(seed):
        wrapped = network.wrap(copy.deepcopy(module), x)
    if isinstance(wrapped, MethodModule):
        wrapped.kind = kind
    return wrapped
