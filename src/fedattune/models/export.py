"""A client's model as a file for use elsewhere, checked to predict the same.

ONNX files, run by ONNX Runtime.
"""

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
from torch import Tensor, nn

from ..core.errors import ConfigError, RunError, summarize_error
from ..core.io import clean_file_name, replace_atomically
from .files import CARD_KEY, ModelCard, describe_model, get_dtype, is_rebuildable, load_model, save_model

LogitsFunction = Callable[[Tensor], Tensor]
"""Prepared inputs (B, ...) to logits (B, classes)."""


def require_onnx(*packages: str) -> None:
    """Refuse to go on without packages for ONNX.

    Raises:
        ConfigError: some are missing.

    """
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {' and '.join(missing)}; pip install 'fedattune[export]'")


def open_onnx(file: Path) -> tuple[LogitsFunction, dict[str, str]]:
    """The network of an ONNX file, run by ONNX Runtime on the CPU, and the text that the file holds.

    Raises:
        ConfigError: ONNX Runtime is missing.
        RunError: the file cannot be read as ONNX.

    """
    require_onnx("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is said by its exceptions
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no class in common
        raise RunError(f"{file} cannot be read as ONNX: {summarize_error(error)}") from error
    name = session.get_inputs()[0].name

    def logits(x: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        except Exception as error:
            raise RunError(f"{file} cannot be run: {summarize_error(error)}") from error

    return logits, dict(session.get_modelmeta().custom_metadata_map)


ExportFormat = Literal["safetensors", "torch-export", "onnx"]


FORMAT_SUFFIXES: dict[ExportFormat, str] = {
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
    "onnx": ".onnx",
}


MAX_ONNX_BYTES = 2_000_000_000
"""Bytes of weights that fit into one ONNX file, whose format ends at 2 GiB."""


CHECK_BATCH_SIZES = (1, 7)
"""Sizes of the batches on which a written model is compared with the one it was made of."""


LOGIT_TOLERANCE = {torch.float64: 1e-9}
"""Largest difference of logits, in parts of the largest one; another order of sums is no fault."""


ANSI_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")


NOISY_LOGGERS = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes")
"""Logs of what is no concern of the user: that torchvision is not here, where a graph broke that is told anyway."""


@dataclass(frozen=True)
class ExportedModel:
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


def make_file_name(number: int, client: str) -> str:
    """What a client's file is called, without its ending."""
    return f"{number:04d}-{clean_file_name(client)}"


def export_model(file: Path, model: nn.Module, card: ModelCard, format: ExportFormat) -> ExportedModel:  # noqa: A002
    """Write a model and its card, and check that the file predicts the same; else nothing is written.

    Raises:
        ConfigError: the file's name is none of the format, or packages for ONNX are missing.
        RunError: the model cannot be written so, or what was written predicts otherwise.

    """
    check_format(format)
    if file.suffix.lower() != FORMAT_SUFFIXES[format]:
        raise ConfigError(
            f"{file}: a file of the format {format} ends in {FORMAT_SUFFIXES[format]}; name it so"
        )
    card = describe_model(model, card)
    write, read = WRITE_AND_READ[format]
    with replace_atomically(file) as new:
        with _silence_pytorch():
            write(new, model, card)
            difference = _compare_logits(read(new, model, card), model, card, format)
        size = new.stat().st_size
    return ExportedModel(file, format, size, difference, card["input"], card["output"])


def check_format(format: str) -> None:  # noqa: A002
    """Refuse a format that cannot be written here.

    Raises:
        ConfigError: there is no such format, or packages for it are missing.

    """
    if format not in FORMAT_SUFFIXES:
        raise ConfigError(f"format: expected {', '.join(get_args(ExportFormat))}, got {format!r}")
    if format == "onnx":
        require_onnx("onnx", "onnxscript", "onnxruntime")


def _write_torch_export(file: Path, model: nn.Module, card: ModelCard) -> None:
    torch.export.save(_trace_model(model, card), file, extra_files={f"{CARD_KEY}.json": json.dumps(card)})


def _read_safetensors(file: Path, model: nn.Module, card: ModelCard) -> LogitsFunction:
    """As one reads it elsewhere; a module of the user's own must be given."""
    return load_model(file, None if is_rebuildable(card) else model, factory=card["model"])


def _read_torch_export(file: Path, _model: nn.Module, _card: ModelCard) -> LogitsFunction:
    """The network of a file that was written here just now: to load any other could run code that is in it."""
    return torch.export.load(file).module()


def _read_onnx(file: Path, _model: nn.Module, _card: ModelCard) -> LogitsFunction:
    """By ONNX Runtime, which has no layers of every type, such as convolutions of float64."""
    try:
        return open_onnx(file)[0]
    except RunError as error:
        raise _make_export_error("onnx", error) from error


def _write_onnx(file: Path, model: nn.Module, card: ModelCard) -> None:
    size = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise RunError(
            f"the model has {size / 1e9:.1f} GB of weights, and an ONNX file holds 2 GB; export it as safetensors"
        )
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
    axes, graph = ({0: torch.export.Dim("batch")},), _trace_model(model, card)
    try:
        made = torch.onnx.export(graph, dynamo=True, dynamic_shapes=axes, verbose=False, **names)
    except Exception as error:
        raise _make_export_error("onnx", error) from error
    assert made is not None
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose folders the code stands
    made.model.metadata_props[CARD_KEY] = json.dumps(card)
    made.save(file, external_data=False)


def _trace_model(model: nn.Module, card: ModelCard) -> torch.export.ExportedProgram:
    """The model as a graph of prepared inputs (B, ...), B any number."""
    x = torch.zeros(3, *card["input_shape"], dtype=get_dtype(model))
    try:
        with redirect_stderr(io.StringIO()):  # to which it prints the code that it cannot follow
            found = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        raise _make_export_error("a graph, as torch-export and onnx are", error) from error
    for node in found.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return found


def _make_export_error(what: str, error: BaseException) -> RunError:
    why = ANSI_COLOR_CODE.sub("", summarize_error(error.__cause__ or error))
    return RunError(
        f"the model cannot be written as {what}: {why}; export it as safetensors, which keeps its weights"
    )


def _compare_logits(logits: LogitsFunction, model: nn.Module, card: ModelCard, format: str) -> float:  # noqa: A002
    """The largest difference of logits on random inputs.

    Raises:
        RunError: it is more than rounding, or a class differs.

    """
    random, dtype = torch.Generator().manual_seed(0), get_dtype(model)
    largest = 0.0
    for n in CHECK_BATCH_SIZES:
        x = torch.randn(n, *card["input_shape"], generator=random, dtype=dtype)
        with torch.no_grad():
            ours, theirs = model(x), logits(x)
        difference = float((ours - theirs).abs().max())
        room = LOGIT_TOLERANCE.get(dtype, 1e-4) * max(1.0, float(ours.abs().max()))
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
def _silence_pytorch() -> Iterator[None]:
    """Without what PyTorch says of its own code while it writes graphs."""
    logs = [logging.getLogger(name) for name in NOISY_LOGGERS]
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


WRITE_AND_READ: dict[
    str,
    tuple[
        Callable[[Path, nn.Module, ModelCard], None], Callable[[Path, nn.Module, ModelCard], LogitsFunction]
    ],
] = {
    "safetensors": (save_model, _read_safetensors),
    "torch-export": (_write_torch_export, _read_torch_export),
    "onnx": (_write_onnx, _read_onnx),
}
