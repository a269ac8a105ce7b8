"""Which versions of FedAttune work together in one federation."""

import re

from ..core.errors import RunError

LARGEST_MINOR_DISTANCE = 1
"""Minor versions that a node may be behind or ahead of the server."""


def check_versions(ours: str, theirs: str, where: str) -> str:
    """Compare the versions of FedAttune of two programs of a federation.

    The same major version and at most one minor version apart is fine, so that nodes can be upgraded one by one.

    Args:
        ours: version of this program, such as 1.4.0.
        theirs: version of the other program; empty if the program sent none.
        where: name of the other program in messages.

    Returns:
        A note about a difference; empty if the versions are the same.

    Raises:
        RunError: the versions do not work together.

    """
    mine, other = _read(ours), _read(theirs)
    if other is None or mine is None:
        raise RunError(
            f"{where} has FedAttune {theirs!r:.40}, expected a version such as {ours}; install FedAttune {ours} there"
        )
    if mine[0] != other[0] or abs(mine[1] - other[1]) > LARGEST_MINOR_DISTANCE:
        raise RunError(
            f"{where} has FedAttune {theirs:.40} and the server has {ours}, expected the same major version and at "
            f"most {LARGEST_MINOR_DISTANCE} minor version apart; install FedAttune {ours} there"
        )
    if theirs == ours:
        return ""
    return f"{where} has FedAttune {theirs:.40} and the server has {ours}; upgrade the older one soon"


def _read(version: str) -> tuple[int, int] | None:
    """Read major and minor number; None if the text is no version."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})(?![0-9])", version, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None
