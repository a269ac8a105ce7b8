"""Personalized federated learning: should we federate, with which method, and who gains?"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

# PyTorch reads it when it first takes memory: gigabytes of mixtures are written in half the time into huge pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# PyTorch's threads wait for more work in a busy loop of ten milliseconds, on cores that groups of clients need.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from . import algorithms, models
    from .analysis.load import Runs, read_runs
    from .analysis.output.formats import register_format
    from .analysis.output.report import write_report
    from .core.algorithm import Algorithm, ClientUpdate, FineTune, Participation, ServerUpdate
    from .core.errors import ConfigError, DataError, FedAttuneError, ModelError, RunError
    from .core.metrics import register_metric
    from .core.params import Params
    from .core.payload import Broadcast, Payload
    from .core.settings import Settings
    from .data import Federation, federation_from, load_federation
    from .data.sequences import pad_sequences
    from .experiments.compare import Comparison, TunedMethod, compare, tune
    from .models.files import load_model
    from .models.padding import WithPadding
    from .models.predict import Predictions, predict
    from .runs.callbacks import Callback, EarlyStop, MLflow, OnRound, WandB
    from .runs.result import ClientResult, Result
    from .runs.tensorboard import TensorBoard
    from .server.robust import register_robust_rule
    from .training.fit import Progress, fit
    from .training.newcomers import personalize
    from .training.uploads.step import UploadStep

# Names are loaded when first used, so that `fedattune --help` need not wait for PyTorch.
_MODULE_OF = {
    name: module
    for module, names in {
        "analysis.load": ("Runs", "read_runs"),
        "analysis.output.formats": ("register_format",),
        "analysis.output.report": ("write_report",),
        "core.algorithm": ("Algorithm", "ClientUpdate", "FineTune", "Participation", "ServerUpdate"),
        "core.errors": ("ConfigError", "DataError", "FedAttuneError", "ModelError", "RunError"),
        "core.metrics": ("register_metric",),
        "core.params": ("Params",),
        "core.payload": ("Broadcast", "Payload"),
        "core.settings": ("Settings",),
        "experiments.compare": ("Comparison", "TunedMethod", "compare", "tune"),
        "data": ("Federation", "federation_from", "load_federation"),
        "data.sequences": ("pad_sequences",),
        "models.files": ("load_model",),
        "models.padding": ("WithPadding",),
        "models.predict": ("Predictions", "predict"),
        "server.robust": ("register_robust_rule",),
        "training.fit": ("Progress", "fit"),
        "training.newcomers": ("personalize",),
        "training.uploads.step": ("UploadStep",),
        "runs.callbacks": ("Callback", "EarlyStop", "MLflow", "OnRound", "WandB"),
        "runs.result": ("ClientResult", "Result"),
        "runs.tensorboard": ("TensorBoard",),
    }.items()
    for name in names
}


_RENAMED = {"federation": "federation_from"}
"""Old name -> new name."""


def __getattr__(name: str) -> Any:
    if name in ("algorithms", "models"):
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        hint = f"; it is called {_RENAMED[name]} now" if name in _RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Algorithm",
    "Broadcast",
    "Callback",
    "ClientResult",
    "ClientUpdate",
    "Comparison",
    "ConfigError",
    "DataError",
    "EarlyStop",
    "FedAttuneError",
    "Federation",
    "FineTune",
    "MLflow",
    "ModelError",
    "OnRound",
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
    "TensorBoard",
    "TunedMethod",
    "UploadStep",
    "WandB",
    "WithPadding",
    "__version__",
    "algorithms",
    "compare",
    "federation_from",
    "fit",
    "load_federation",
    "load_model",
    "models",
    "pad_sequences",
    "personalize",
    "predict",
    "read_runs",
    "register_format",
    "register_metric",
    "register_robust_rule",
    "tune",
    "write_report",
]
