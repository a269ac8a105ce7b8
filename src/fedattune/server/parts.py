"""FedAvg of the shared parts of a network whose personal parts have a global counterpart."""

from dataclasses import dataclass
from typing import cast

from ..core import State
from ..params import Params
from .average import Average


@dataclass(frozen=True)
class PartAverage(Average):
    """FedAvg; for clients that join after training, personal parts start as copies of trained shared ones.

    `copies` has pairs of parts: the personal one and the shared one that it starts as.
    """

    copies: tuple[tuple[str, str], ...] = ()

    def newcomer(self, state: State) -> Params:
        """The global model, and personal parts made of it."""
        w = cast(Params, state["w"])
        more = {
            own + name.removeprefix(shared): value
            for own, shared in self.copies
            for name, value in w.items()
            if name.startswith(shared + ".")
        }
        return Params({**w, **more})
