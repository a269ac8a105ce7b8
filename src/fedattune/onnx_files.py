"""ONNX files, run by ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .errors import ConfigError, RunError, brief

Logits = Callable[[Tensor], Tensor]
"""Prepared inputs (B, ...) to logits (B, classes)."""


def need_onnx(*packages: str) -> None:
    """Refuse to go on without packages for ONNX.

    Raises:
        ConfigError: some are missing.

    """
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {' and '.join(missing)}; pip install 'fedattune[export]'")


def onnx_logits(file: Path) -> tuple[Logits, dict[str, str]]:
    """The network of an ONNX file, run by ONNX Runtime on the CPU, and the text that the file holds.

    Raises:
        ConfigError: ONNX Runtime is missing.
        RunError: the file cannot be read as ONNX.

    """
    need_onnx("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is said by its exceptions
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no class in common
        raise RunError(f"{file} cannot be read as ONNX: {brief(error)}") from error
    name = session.get_inputs()[0].name

    def logits(x: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        except Exception as error:
            raise RunError(f"{file} cannot be run: {brief(error)}") from error

    return logits, dict(session.get_modelmeta().custom_metadata_map)
