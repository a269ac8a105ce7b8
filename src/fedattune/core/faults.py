"""Define failures as values: what went wrong with one client in one round, worded in one place."""

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "offline",  # no connection to the node
    "removed",  # the server's operators removed the node's key
    "late",  # the reply did not come in time
    "failed",  # the node reported an error of its own
    "lost_state",  # the node no longer has a state that the server expects it to have
    "refused",  # the reply is not what the request asks for
    "not_finite",  # values are not finite
    "norm",  # the norm of the update is far above the usual norm
    "layer",  # a layer keeps an unusual share of the sent layer
    "harm",  # after the update, most clients refused what they were sent
    "labels",  # the classes look like other classes of the others
    "rejected",  # a custom step rejected the upload
]


@dataclass(frozen=True)
class Fault:
    """A failure of one client in one round. Its text is the reason that results and logs show.

    Attributes:
        kind: what went wrong; programs decide by it, never by the wording.
        detail: the rest of a sentence about the client or its node, for a person.
        node: name of the client's node; empty in a simulation.
    """

    kind: FaultKind
    detail: str = ""
    node: str = ""

    def __str__(self) -> str:
        return f"{self.node} {self.detail}".strip()
