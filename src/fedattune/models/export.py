"""Export a client's model to a file for use elsewhere, and check that the file predicts the same."""

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, RunError, summarize_error
from ..core.io import clean_file_name, replace_atomically
from .files import (
    CARD_KEY,
    ModelCard,
    describe_model,
    draw_inputs,
    get_dtype,
    get_integer_type,
    is_rebuildable,
    load_model,
    save_model,
)

LogitsFunction = Callable[[Tensor], Tensor]
"""Prepared inputs (B, ...) to logits (B, classes)."""
ExportFormat = Literal["safetensors", "torch-export", "onnx"]
FORMAT_SUFFIXES: dict[ExportFormat, str] = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
MAX_ONNX_BYTES = 2_000_000_000
"""Bytes of weights that fit into one ONNX file, whose format ends at 2 GiB."""
CHECK_BATCH_SIZES = (1, 7)
"""Samples in the two batches on which the written model and the run's model are compared."""
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of logits relative to the largest logit; another runtime adds in another order."""
ANSI_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")
NOISY_LOGGERS = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes")
"""Loggers whose messages do not concern the user: torchvision is missing; a graph broke (an error says so, too)."""


@dataclass(frozen=True)
class ExportedModel:
    """A model that was written and checked."""

    file: Path
    format: str
    size_bytes: int
    max_difference: float  # the largest between the logits of the file and of the run's model, on random inputs
    input: str  # the inputs of the network in the file, in words
    output: str


def make_file_name(number: int, client: str) -> str:
    """Return the name of a client's file without its suffix."""
    return f"{number:04d}-{clean_file_name(client)}"


def export_model(file: Path, model: nn.Module, card: ModelCard, format: ExportFormat) -> ExportedModel:  # noqa: A002
    """Write a model and its card, and keep the file only if it predicts the same."""
    check_format(format, file)
    card = describe_model(model, card)
    write, read = WRITE_AND_READ[format]
    with replace_atomically(file) as new:
        with _silence_pytorch():
            write(new, model, card)
            difference = _compare_logits(read(new, model, card), model, card, format)
        size = new.stat().st_size
    return ExportedModel(file, format, size, difference, card["input"], card["output"])


def check_format(format: str, file: Path | None = None) -> None:  # noqa: A002
    """Refuse a format that cannot be written here, or a file whose suffix does not belong to the format."""
    if format not in FORMAT_SUFFIXES:
        raise ConfigError(f"format: expected {', '.join(get_args(ExportFormat))}, got {format!r}")
    suffix = FORMAT_SUFFIXES[format]
    if file is not None and file.suffix.lower() != suffix:
        raise ConfigError(f"{file}: a file of the format {format} ends in {suffix}; name it so")
    if format == "onnx":
        _require_packages("onnx", "onnxscript", "onnxruntime")


def _require_packages(*packages: str) -> None:
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"ONNX needs {' and '.join(missing)}; pip install 'fedattune[export]'")


def open_onnx(file: Path) -> tuple[LogitsFunction, dict[str, str]]:
    """Open an ONNX file with ONNX Runtime on the CPU; return its network and its metadata."""
    _require_packages("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its exceptions carry the same messages
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no class in common
        raise RunError(f"{file} cannot be read as ONNX: {summarize_error(error)}") from error
    name = session.get_inputs()[0].name

    def compute_logits(x: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        except Exception as error:
            raise RunError(f"{file} cannot be run: {summarize_error(error)}") from error

    return compute_logits, dict(session.get_modelmeta().custom_metadata_map)


def _read_safetensors(file: Path, model: nn.Module, card: ModelCard) -> LogitsFunction:
    """Load the file as a user would; a custom module must be passed."""
    return load_model(file, None if is_rebuildable(card) else model, factory=card["model"])


def _write_torch_export(file: Path, model: nn.Module, card: ModelCard) -> None:
    torch.export.save(_trace_model(model, card), file, extra_files={f"{CARD_KEY}.json": json.dumps(card)})


def _read_torch_export(file: Path, _model: nn.Module, _card: ModelCard) -> LogitsFunction:
    """Load a file that this process has just written; any other file could run code of its own."""
    return torch.export.load(file).module()


def _write_onnx(file: Path, model: nn.Module, card: ModelCard) -> None:
    size = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise RunError(
            f"the model has {size / 1e9:.1f} GB of weights, and an ONNX file holds 2 GB; export it as safetensors"
        )
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
    axes, graph = ({0: torch.export.Dim("batch")},), _trace_model(model, card)
    try:
        program = torch.onnx.export(graph, dynamo=True, dynamic_shapes=axes, verbose=False, **names)
    except Exception as error:
        raise _make_export_error("onnx", error) from error
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # they name folders of this machine
    program.model.metadata_props[CARD_KEY] = json.dumps(card)
    program.save(file, external_data=False)


def _read_onnx(file: Path, _model: nn.Module, _card: ModelCard) -> LogitsFunction:
    """Open the file; ONNX Runtime lacks some layers for some types, such as convolutions of float64."""
    try:
        return open_onnx(file)[0]
    except RunError as error:
        raise _make_export_error("onnx", error) from error


def _trace_model(model: nn.Module, card: ModelCard) -> torch.export.ExportedProgram:
    """Trace the model as a graph of prepared inputs (B, ...) for any B."""
    x = torch.zeros(3, *card["input_shape"], dtype=get_integer_type(card) or get_dtype(model))
    try:
        with redirect_stderr(io.StringIO()):  # PyTorch prints code that it cannot follow
            program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        raise _make_export_error("a graph, as torch-export and onnx are", error) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of this machine
    return program


def _make_export_error(form: str, error: BaseException) -> RunError:
    why = ANSI_COLOR_CODE.sub("", summarize_error(error.__cause__ or error))
    return RunError(f"the model cannot be written as {form}: {why}; export it as safetensors, which keeps its weights")


def _advise_other_format(format: str) -> str:  # noqa: A002
    if format != "safetensors":
        return "export it as safetensors, which keeps its weights"
    return "a model whose outputs change from call to call cannot be exported; check its forward pass in eval mode"


def _compare_logits(logits: LogitsFunction, model: nn.Module, card: ModelCard, format: str) -> float:  # noqa: A002
    """Return the largest difference of logits on random inputs."""
    generator, dtype = torch.Generator().manual_seed(0), get_dtype(model)
    largest = 0.0
    for n in CHECK_BATCH_SIZES:
        x = draw_inputs(model, card, n, generator)
        try:
            with torch.no_grad():
                ours = model(x)
        except Exception as error:  # code of a user raises anything
            raise RunError(
                f"the model of client {card.get('client', '')!r} takes neither random inputs nor zeros of the shape "
                f"{tuple(x.shape)}, so a file cannot be checked: {summarize_error(error)}; correct its forward, or "
                "write the models unchecked by Result.save_models"
            ) from error
        with torch.no_grad():
            theirs = logits(x)
        if not bool(ours.isfinite().all()):
            raise RunError(
                f"the model of client {card.get('client', '')!r} gives values that are not finite, so its training "
                "diverged: nothing was written; train again with a lower learning rate"
            )
        difference = float((ours - theirs).abs().max())
        limit = LOGIT_TOLERANCE[dtype] * max(1.0, float(ours.abs().max()))
        # Of two classes that are equal but for rounding, either may be the larger one.
        predicted = ours.gather(1, theirs.argmax(1, keepdim=True)).squeeze(1)
        if not (difference <= limit and bool((predicted >= ours.amax(1) - 2 * difference).all())):
            raise RunError(
                f"the file that was written as {format} predicts otherwise than the run's model: logits differ by "
                f"{difference:.2g}, expected at most {limit:.2g}; the file was removed; {_advise_other_format(format)}"
            )
        largest = max(largest, difference)
    return largest


@contextmanager
def _silence_pytorch() -> Iterator[None]:
    """Hide the messages of PyTorch about its own code while it writes graphs."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*LeafSpec.*is deprecated", category=FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


WRITE_AND_READ: dict[
    ExportFormat,
    tuple[Callable[[Path, nn.Module, ModelCard], None], Callable[[Path, nn.Module, ModelCard], LogitsFunction]],
] = {
    "safetensors": (save_model, _read_safetensors),
    "torch-export": (_write_torch_export, _read_torch_export),
    "onnx": (_write_onnx, _read_onnx),
}
