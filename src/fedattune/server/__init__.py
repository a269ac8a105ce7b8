"""Server rules: one global model (Average) or a mixture of client models for every client (Mixing)."""

from .average import Average, PartAverage
from .mixing import Mixing, Pool, UploadStore
from .optimizer import ServerOptimizer
from .wrapper import ServerWrapper

__all__ = ["Average", "Mixing", "PartAverage", "Pool", "ServerOptimizer", "ServerWrapper", "UploadStore"]
