"""What methods train in place of the user's model."""

from .separation import FedAMNetwork, FedCPNetwork, Separation
from .two_heads import TwoHeads

__all__ = ["FedAMNetwork", "FedCPNetwork", "Separation", "TwoHeads"]
