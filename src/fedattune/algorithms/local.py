"""Local training: nothing is shared. What every personalized method must beat."""

from ..client import SGD
from ..core import Algorithm, Participation
from ..select import Everything
from ..server import Average


def local() -> Algorithm:
    """Every client trains alone, in every round: theta_i <- theta_i - lr g_i(theta_i)."""
    return Algorithm(SGD(), Average(), personal=Everything(), participation=Participation(train="all"))
