"""Personalized federated learning: should we federate, with which method, and who gains?"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

# PyTorch reads it when it first takes memory: gigabytes of mixtures are written in half the time into huge pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from . import algorithms, models
    from .config import Settings
    from .core import Algorithm, ClientUpdate, FineTune, Participation, Payload, ServerUpdate
    from .data import Federation, federation, load_federation
    from .errors import ConfigError, DataError, FedAttuneError, ModelError, RunError
    from .params import Params
    from .personal_models import load_model
    from .prediction import Predictions, predict
    from .reading import Runs, read_runs
    from .report import write_report
    from .result import ClientResult, Result
    from .trainer import Progress, fit

# Names are loaded when first used, so that `fedattune --help` need not wait for PyTorch.
_MODULE_OF = {
    "Settings": "config",
    **dict.fromkeys(
        ("Algorithm", "ClientUpdate", "FineTune", "Participation", "Payload", "ServerUpdate"), "core"
    ),
    **dict.fromkeys(("Federation", "federation", "load_federation"), "data"),
    **dict.fromkeys(("ConfigError", "DataError", "FedAttuneError", "ModelError", "RunError"), "errors"),
    "Params": "params",
    "load_model": "personal_models",
    **dict.fromkeys(("Predictions", "predict"), "prediction"),
    **dict.fromkeys(("Runs", "read_runs"), "reading"),
    "write_report": "report",
    **dict.fromkeys(("ClientResult", "Result"), "result"),
    **dict.fromkeys(("Progress", "fit"), "trainer"),
}


def __getattr__(name: str) -> Any:
    if name in ("algorithms", "models"):
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Algorithm",
    "ClientResult",
    "ClientUpdate",
    "ConfigError",
    "DataError",
    "FedAttuneError",
    "Federation",
    "FineTune",
    "ModelError",
    "Params",
    "Participation",
    "Payload",
    "Predictions",
    "Progress",
    "Result",
    "RunError",
    "Runs",
    "ServerUpdate",
    "Settings",
    "__version__",
    "algorithms",
    "federation",
    "fit",
    "load_federation",
    "load_model",
    "models",
    "predict",
    "read_runs",
    "write_report",
]
