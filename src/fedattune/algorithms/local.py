"""Local training: nothing is shared. What every personalized method must beat."""

from ..client import SGD
from ..core.algorithm import Algorithm, Participation
from ..core.selectors import AllParameters
from ..server import Average
from .table import Family, method


@method(family=Family.LOCAL, server="nothing", client="trains alone")
def local() -> Algorithm:
    """Every client trains alone, in every round: theta_i <- theta_i - lr g_i(theta_i)."""
    return Algorithm(SGD(), Average(), personal=AllParameters(), participation=Participation(train="all"))
