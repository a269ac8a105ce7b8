"""Server rules: one global model (Average) or a mixture of client models for every client (Mixing)."""

from .attention import AMP, Attention, HeurAMP
from .average import Average
from .mixing import Mixing, Pool

__all__ = ["AMP", "Attention", "Average", "HeurAMP", "Mixing", "Pool"]
