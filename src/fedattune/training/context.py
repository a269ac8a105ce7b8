"""Progress of a run."""

from typing import NamedTuple


class Progress(NamedTuple):
    """Where a run stands; `accuracy` is the mean over clients at the headline point, at the last evaluation."""

    round: int
    rounds: int
    accuracy: float | None
    seconds: float
