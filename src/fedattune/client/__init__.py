"""Client rules and corrections that several papers share."""

from .meta import Meta
from .moreau import Moreau
from .sgd import SGD, Correction, Proximal, Start

__all__ = ["SGD", "Correction", "Meta", "Moreau", "Proximal", "Start"]
