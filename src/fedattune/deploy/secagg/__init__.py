"""Secure aggregation: the server learns sums over nodes, and no single node's numbers.

The protocol has four rounds and a check of the survivors: Bonawitz et al., Practical Secure Aggregation for
Privacy-Preserving Machine Learning (CCS 2017), the variant against a malicious server. `session.py` is
the protocol without a network; `runtime.py` and `transport.py` put its two sides behind a deployment's messages. A node
that leaves a session tells the server only the name of the error's class, one of those here.
"""

import math

from ...core.errors import RunError

MIN_NODES, MAX_NODES = 3, 49
"""Nodes of a federation with secure aggregation; each node makes a share for every other one."""

LEAST_THRESHOLD = 2 / 3
"""Minimum share of a session's nodes of which more must help to take off masks.

A lying server that has nodes sign two lists of survivors opens a node's upload from 2t - n colluding nodes on (Bonawitz
et al., CCS 2017). With t > 2n/3, these are more than a third of the nodes.
"""


class SecureAggregationError(RunError):
    """A session of secure aggregation cannot go on."""


class SecureAggregationRequiredError(SecureAggregationError):
    """The server asks for what only a sum over nodes may tell."""


class SessionMismatchError(SecureAggregationError):
    """A message belongs to another session, or does not describe what the node was told before."""


class TooFewParticipantsError(SecureAggregationError):
    """A sum over these nodes would tell too much, or their shares would not be enough."""


class UnknownKeyError(SecureAggregationError):
    """A node's key is not in the roster."""


class BadSignatureError(SecureAggregationError):
    """A signature does not fit the content and the key."""


class ReplayedKeysError(SecureAggregationError):
    """An ephemeral key appears twice, or a node's own keys come back changed."""


class SurvivorsError(SecureAggregationError):
    """The lists of survivors contradict each other."""


class TamperedShareError(SecureAggregationError):
    """An encrypted share is not what its sender signed for this node."""


class ClipRangeError(SecureAggregationError):
    """A value or a weight of a node is out of the range of the sum."""


class ImpossibleSumError(SecureAggregationError):
    """An opened sum is none that nodes can have which keep to the protocol; no sum tells whose numbers are wrong."""


class AlreadySummedError(SecureAggregationError):
    """The node has taken part in a sum of this round: two sums over other nodes would tell their difference."""


def count_threshold(share: float, n: int) -> int:
    """Return the number t of nodes whose shares are enough: more than `share` of n, and more than two thirds."""
    return min(n, max(2 * n // 3, math.floor(share * n)) + 1)
