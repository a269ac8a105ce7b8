"""Local training: nothing is shared. Every personalized method must beat it."""

from ..client import SGD
from ..core.algorithm import Algorithm, Participation
from ..core.selectors import AllParameters
from ..server import Average
from .table import Family, method


@method(Family.LOCAL, "nothing", "trains alone")
def local() -> Algorithm:
    """Every client trains alone in every round: theta_i <- theta_i - lr g_i(theta_i)."""
    return Algorithm(SGD(), Average(), personal=AllParameters(), participation=Participation(train="all"))
