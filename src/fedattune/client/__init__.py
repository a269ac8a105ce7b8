"""Client rules and corrections that several papers share."""

from .meta import Meta
from .moreau import Moreau
from .sgd import SGD, Correction, Local, Proximal, Start

__all__ = ["SGD", "Correction", "Local", "Meta", "Moreau", "Proximal", "Start"]
