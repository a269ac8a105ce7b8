"""Measure how much the mechanism of a method does in a run: the distance from the same run without it."""

from typing import NamedTuple

from torch import Tensor

from .payload import MixingMatrices

IDLE_BELOW = 0.01
"""Distance below which a mechanism counts as idle: the numbers of such a run are those of another method."""


class Mechanism(NamedTuple):
    """The point of a method: values that it changes, and what the method is without the change.

    Attributes:
        part: the values, in one plural word: `weights`, `steps`, `updates`, `starts`, `models` or `predictions`.
        reference: the same values without the mechanism.
        equivalent: what a run with these values is.
    """

    part: str
    reference: str
    equivalent: str


class Effect(NamedTuple):
    """The effect of one mechanism at the end of a run: the relative distance of the values from its reference."""

    mechanism: Mechanism
    value: float

    @property
    def is_idle(self) -> bool:
        return self.value < IDLE_BELOW

    @property
    def sentence(self) -> str:
        """Say how far the values are from the reference, and what the run of an idle mechanism is."""
        part, reference, equivalent = self.mechanism
        if not self.is_idle:
            return f"the {part} are {100 * self.value:.0f}% away from {reference}"
        distance = f"within {100 * self.value:.1g}% of" if self.value else "equal to"
        return f"the {part} stayed {distance} {reference}: this run is {equivalent}"


ONE_MIXTURE = Mechanism(
    "weights", "one mixture for all clients", "FedAvg, fine-tuned if the method judges clients after local training"
)
OWN_MODEL = Mechanism("weights", "the client's own model alone", "training alone")


def measure_mixing(mixing: MixingMatrices | None) -> tuple[Effect, ...]:
    """Measure mixing matrices: the distance from equal rows, and from rows that hold the own model alone.

    Both are total variation distances from 0 to 1, averaged over clients and components. One row alone has no distance
    from equal rows.
    """
    if mixing is None or not len(mixing.rows):
        return ()
    own = mixing.rows[:, None] == mixing.columns
    from_equal, from_own = [], []
    for matrix in mixing.weights.values():
        weights = matrix.double()
        from_equal.append(total_variation(weights, weights.mean(0, keepdim=True)))
        from_own.append(total_variation(weights, own.to(weights)))
    distances = {ONE_MIXTURE: from_equal, OWN_MODEL: from_own}
    if len(mixing.rows) < 2:
        del distances[ONE_MIXTURE]
    return tuple(Effect(mechanism, sum(each) / len(each)) for mechanism, each in distances.items())


def total_variation(a: Tensor, b: Tensor) -> float:
    """Return half the sum of absolute differences of each row, averaged over the rows."""
    return float((a - b).abs().sum(1).mean()) / 2
