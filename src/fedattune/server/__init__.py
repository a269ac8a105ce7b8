"""Server rules: one global model (Average) or a mixture of client models for every client (Mixing)."""

from .around import Around, Controls, Displacement
from .attention import AMP, Attention, HeurAMP
from .average import Average
from .bank import Bank
from .coin import Coin
from .generated import Generated
from .learned import Learned
from .mixing import Mixing, Pool
from .optimizers import Adaptive, HeavyBall, ServerOptimizer
from .parts import PartAverage
from .peers import Peers
from .relations import Relations
from .retained import Retained
from .update_attention import UpdateAttention

__all__ = [
    "AMP",
    "Adaptive",
    "Around",
    "Attention",
    "Average",
    "Bank",
    "Coin",
    "Controls",
    "Displacement",
    "Generated",
    "HeavyBall",
    "HeurAMP",
    "Learned",
    "Mixing",
    "PartAverage",
    "Peers",
    "Pool",
    "Relations",
    "Retained",
    "ServerOptimizer",
    "UpdateAttention",
]
