"""Define failures as values: what went wrong with one client in one round, worded in one place."""

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "unreachable",  # no connection, or the worker is gone
    "no_reply",  # the reply did not come in time
    "error",  # the client reported an error of its own
    "malformed",  # the reply is not what the request asks for
    "not_finite",  # values are not finite
    "norm",  # the norm of the update is far above the usual norm
    "layer",  # a layer keeps an unusual share of what was sent
    "direction",  # the updates oppose those of the others
    "labels",  # the classes look like other classes of the others
    "rejected",  # a custom step rejected the upload
    "policy",  # the node's policy does not allow the request
    "version",  # the node runs an incompatible version
    "secure",  # a step of secure aggregation failed
]


@dataclass(frozen=True)
class Fault:
    """A failure of one client in one round.

    Attributes:
        kind: what went wrong; programs decide by it, never by the wording.
        detail: what is known beside the kind, for a person.
        client: number of the client; None if the place where the fault was made does not know it.
        round: number of the round; None likewise.

    """

    kind: FaultKind
    detail: str = ""
    client: int | None = None
    round: int | None = None
