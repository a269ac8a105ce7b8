"""A client's model as a file for use elsewhere, checked to predict the same."""

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from .errors import ConfigError, RunError, brief
from .files import replacing
from .onnx_files import Logits, need_onnx, onnx_logits
from .personal_models import CARD, Card, described, dtype_of, has_name, load_model, save_model

Format = Literal["safetensors", "torch-export", "onnx"]

SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
LARGEST = 2_000_000_000
"""Bytes of weights that fit into one ONNX file, whose format ends at 2 GiB."""

BATCHES = (1, 7)
"""Sizes of the batches on which a written model is compared with the one it was made of."""

TOLERANCE = {torch.float64: 1e-9}
"""Largest difference of logits, in parts of the largest one; another order of sums is no fault."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

CHATTY = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes")
"""Logs of what is no concern of the user: that torchvision is not here, where a graph broke that is told anyway."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        file: where it is.
        format: "safetensors", "torch-export" or "onnx".
        bytes: its size.
        difference: the largest one between its logits and those of the run's model, on random inputs.
        input: what the network in the file takes.
        output: what it gives.

    """

    file: Path
    format: str
    bytes: int
    difference: float
    input: str
    output: str


def file_name(number: int, client: str) -> str:
    """What a client's file is called, without its ending."""
    return f"{number:04d}-{plain_name(client)}"


def plain_name(client: str) -> str:
    """A client's name with nothing that a file's name cannot hold."""
    return re.sub(r"[^\w.-]", "_", client)


def export(file: Path, model: nn.Module, card: Card, format: Format) -> Exported:  # noqa: A002
    """Write a model and its card, and check that the file predicts the same; else nothing is written.

    Raises:
        ConfigError: the file's name is none of the format, or packages for ONNX are missing.
        RunError: the model cannot be written so, or what was written predicts otherwise.

    """
    check_format(format)
    if file.suffix.lower() != SUFFIXES[format]:
        raise ConfigError(f"{file}: a file of the format {format} ends in {SUFFIXES[format]}; name it so")
    card = described(model, card)
    write, read = WAYS[format]
    with replacing(file) as new:
        with _quiet():
            write(new, model, card)
            difference = _compare(read(new, model, card), model, card, format)
        size = new.stat().st_size
    return Exported(file, format, size, difference, card["input"], card["output"])


def check_format(format: str) -> None:  # noqa: A002
    """Refuse a format that cannot be written here.

    Raises:
        ConfigError: there is no such format, or packages for it are missing.

    """
    if format not in SUFFIXES:
        raise ConfigError(f"format: expected {', '.join(get_args(Format))}, got {format!r}")
    if format == "onnx":
        need_onnx("onnx", "onnxscript", "onnxruntime")


def _write_torch(file: Path, model: nn.Module, card: Card) -> None:
    torch.export.save(_graph(model, card), file, extra_files={f"{CARD}.json": json.dumps(card)})


def _read_safetensors(file: Path, model: nn.Module, card: Card) -> Logits:
    """As one reads it elsewhere; a module of the user's own must be given."""
    return load_model(file, None if has_name(card) else model, factory=card["model"])


def _read_torch(file: Path, _model: nn.Module, _card: Card) -> Logits:
    """The network of a file that was written here just now: to load any other could run code that is in it."""
    return torch.export.load(file).module()


def _read_onnx(file: Path, _model: nn.Module, _card: Card) -> Logits:
    """By ONNX Runtime, which has no layers of every type, such as convolutions of float64."""
    try:
        return onnx_logits(file)[0]
    except RunError as error:
        raise _impossible("onnx", error) from error


def _write_onnx(file: Path, model: nn.Module, card: Card) -> None:
    size = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    if size > LARGEST:
        raise RunError(
            f"the model has {size / 1e9:.1f} GB of weights, and an ONNX file holds 2 GB; export it as safetensors"
        )
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
    axes, graph = ({0: torch.export.Dim("batch")},), _graph(model, card)
    try:
        made = torch.onnx.export(graph, dynamo=True, dynamic_shapes=axes, verbose=False, **names)
    except Exception as error:
        raise _impossible("onnx", error) from error
    assert made is not None
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose folders the code stands
    made.model.metadata_props[CARD] = json.dumps(card)
    made.save(file, external_data=False)


def _graph(model: nn.Module, card: Card) -> torch.export.ExportedProgram:
    """The model as a graph of prepared inputs (B, ...), B any number."""
    x = torch.zeros(3, *card["input_shape"], dtype=dtype_of(model))
    try:
        with redirect_stderr(io.StringIO()):  # to which it prints the code that it cannot follow
            found = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        raise _impossible("a graph, as torch-export and onnx are", error) from error
    for node in found.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return found


def _impossible(what: str, error: BaseException) -> RunError:
    why = COLOURS.sub("", brief(error.__cause__ or error))
    return RunError(
        f"the model cannot be written as {what}: {why}; export it as safetensors, which keeps its weights"
    )


def _compare(logits: Logits, model: nn.Module, card: Card, format: str) -> float:  # noqa: A002
    """The largest difference of logits on random inputs.

    Raises:
        RunError: it is more than rounding, or a class differs.

    """
    random, dtype = torch.Generator().manual_seed(0), dtype_of(model)
    largest = 0.0
    for n in BATCHES:
        x = torch.randn(n, *card["input_shape"], generator=random, dtype=dtype)
        with torch.no_grad():
            ours, theirs = model(x), logits(x)
        difference = float((ours - theirs).abs().max())
        room = TOLERANCE.get(dtype, 1e-4) * max(1.0, float(ours.abs().max()))
        # Of two classes that are equal but for rounding, either may be the larger one.
        chosen = ours.gather(1, theirs.argmax(1, keepdim=True)).squeeze(1)
        if not (difference <= room and bool((chosen >= ours.amax(1) - 2 * difference).all())):
            raise RunError(
                f"the file that was written as {format} predicts otherwise than the run's model: logits differ by "
                f"{difference:.2g}, expected at most {room:.2g}; the file was removed; export it as safetensors"
            )
        largest = max(largest, difference)
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch says of its own code while it writes graphs."""
    logs = [logging.getLogger(name) for name in CHATTY]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*LeafSpec.*is deprecated", category=FutureWarning)
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


WAYS: dict[str, tuple[Callable[[Path, nn.Module, Card], None], Callable[[Path, nn.Module, Card], Logits]]] = {
    "safetensors": (save_model, _read_safetensors),
    "torch-export": (_write_torch, _read_torch),
    "onnx": (_write_onnx, _read_onnx),
}
