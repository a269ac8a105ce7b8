"""The clients that a method harms, told in test rows and against chance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.metrics import Metric, compute_row_losses, format_number
from ..compare import Contestant, FloatArray
from .statistics import adjust_by_holm, compute_row_p

SURE_LOSS = 0.05
"""Holm's adjusted p value up to which a client's loss is more than chance explains."""


@dataclass(frozen=True)
class Harm:
    """The clients that are worse with a method than with its reference.

    Attributes:
        n_clients: clients whose gain is known.
        n_losing: of these, the clients with a loss.
        n_sure: of these, the clients whose test rows show more than chance explains; None if rows are not known.
        worst: name of the client that loses most.
        worst_loss: its loss in words: rows, or the unit of the metric.
        worst_chance: the probability that chance alone makes a client lose so much; None if rows are not known.

    """

    n_clients: int
    n_losing: int
    n_sure: int | None = None
    worst: str = ""
    worst_loss: str = ""
    worst_chance: float | None = None

    def describe(self) -> str:
        """Say how many clients would lose, and which one loses most."""
        if not self.n_losing:
            return f"none of the {self.n_clients} clients would lose"
        text = f"{self.n_losing} of {self.n_clients} clients would lose"
        if self.n_sure is not None:
            sure = {0: "none of them", self.n_losing: "all of them"}.get(
                self.n_sure, f"{self.n_sure} of them"
            )
            text += f", {sure} by more than chance explains"
        who = f"client {self.worst}" if self.n_losing == 1 else f"most of all client {self.worst}"
        return f"{text}; {who} with {self.worst_loss}{self._describe_chance()}"

    def _describe_chance(self) -> str:
        if self.worst_chance is None:
            return ""
        n = max(2, round(1 / max(self.worst_chance, 1e-9)))
        if self.worst_chance > 2 / 3:
            return " (by chance most clients would look so)"
        return f" (by chance 1 in {n:,} clients would look so)" if n <= 1000 else " (hardly by chance)"


def measure_harm(
    pairs: Sequence[tuple[Contestant, Contestant]], gains: FloatArray, metric: Metric, ids: Sequence[str]
) -> Harm:
    """Find the clients that lose.

    Args:
        pairs: runs of the method and of its reference with the same seed and split.
        gains: of each client (N,), in points or in the unit of the metric; NaN where not known.
        metric: the metric.
        ids: names of the clients.

    """
    losing = np.flatnonzero(gains < 0)
    n_clients = int(np.isfinite(gains).sum())
    if not len(losing):
        return Harm(n_clients, 0)
    worst = int(np.nanargmin(gains))
    loss = f"{gains[worst]:.2f} points" if metric.is_percent else metric.format_gap(gains[worst], signed=True)
    if not metric.is_higher_better:
        loss = f"{metric.label} higher by {format_number(-gains[worst], 3)}"
    with_rows = [
        (a.predictions["test"], b.predictions["test"])
        for a, b in pairs
        if "test" in a.predictions and "test" in b.predictions
    ]
    if not with_rows or len(with_rows) < len(pairs):
        return Harm(n_clients, len(losing), None, ids[worst], loss)
    # Splits and seeds share rows, so each test takes one of them; the median is what a typical one shows.
    chance = {
        int(client): float(np.median([compute_row_p(a, b, int(client), metric.name) for a, b in with_rows]))
        for client in losing
    }
    # Any client could have lost, so all of them are tested, those with a gain with p = 1.
    n_sure = sum(
        p <= SURE_LOSS for p in adjust_by_holm([*chance.values(), *[1.0] * (n_clients - len(chance))])
    )
    if metric.name == "accuracy":
        rows = with_rows[0][0].rows(worst)
        n = rows.stop - rows.start
        wrong = [
            int(compute_row_losses(one.y[rows], one.outputs[rows].astype(np.float64), "accuracy").sum())
            for one in with_rows[0]
        ]
        is_one = len(with_rows) == 1
        loss = (
            f"{wrong[0] - wrong[1]} of {n} test rows more wrong"
            if is_one
            else f"{loss} on {n} test row{'s' * (n > 1)}"
        )
    return Harm(n_clients, len(losing), n_sure, ids[worst], loss, chance[worst])
