"""Client rules and corrections that several papers share."""

from .alternating import Alternating
from .choosing import Choosing
from .contraction import Contraction
from .controls import ControlVariates
from .ditto import Ditto
from .group import IndividualAndGroup
from .interpolated import Interpolated
from .local_aggregation import LocalAggregation
from .meta import Meta
from .moreau import Moreau
from .relation import Relation
from .retaining import Retaining
from .separated import Separated
from .sgd import SGD, Correction, Local, Proximal, Start
from .variance import VarianceReduced

__all__ = [
    "SGD",
    "Alternating",
    "Choosing",
    "Contraction",
    "ControlVariates",
    "Correction",
    "Ditto",
    "IndividualAndGroup",
    "Interpolated",
    "Local",
    "LocalAggregation",
    "Meta",
    "Moreau",
    "Proximal",
    "Relation",
    "Retaining",
    "Separated",
    "Start",
    "VarianceReduced",
]
