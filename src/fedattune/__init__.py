"""Personalized federated learning: should we federate, with which method, and who gains?"""

from . import algorithms, models
from ._version import __version__
from .config import Settings
from .core import Algorithm, ClientUpdate, FineTune, Participation, Payload, ServerUpdate
from .data import Federation, federation, load_federation
from .errors import ConfigError, DataError, FedAttuneError, ModelError, RunError
from .params import Params
from .personal_models import load_model
from .result import ClientResult, Result
from .trainer import Progress, fit

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
    "Progress",
    "Result",
    "RunError",
    "ServerUpdate",
    "Settings",
    "__version__",
    "algorithms",
    "federation",
    "fit",
    "load_federation",
    "load_model",
    "models",
]
