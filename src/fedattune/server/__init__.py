"""Server rules that several papers share: one global model, or a mixture of client models for each client."""

from .average import Average, PartAverage
from .mixing import Mixing, Pool, UploadStore
from .optimizer import ServerOptimizer
from .wrapper import ServerWrapper

__all__ = ["Average", "Mixing", "PartAverage", "Pool", "ServerOptimizer", "ServerWrapper", "UploadStore"]
