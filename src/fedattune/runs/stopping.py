"""Early stopping: for each client, the evaluated round whose model is judged, saved and exported.

A client's validation rows choose its round. Few rows say little of a client, so the mean over all clients counts as
PRIOR_ROWS rows more; a client without validation rows follows the mean alone. The loss chooses better than accuracy,
also where accuracy is judged: it separates rounds with equally many right rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.settings import EarlyStopping

FloatArray = NDArray[np.float64]
PRIOR_ROWS = 20.0
"""Rows that the mean over all clients counts for, beside a client's own validation rows."""
MAX_ROW_LOSS = 10.0
"""Upper bound of the mean loss of a client: one that diverged must not hide the rounds of the others."""


class Criterion(NamedTuple):
    """Score of a round, the smaller the better: first `main`, and where this is equal, `tie`; each (E,)."""

    main: FloatArray
    tie: FloatArray

    def is_better_than(self, other: "Criterion") -> NDArray[np.bool_]:
        """Return True for the clients (E,) for which this round is better."""
        return np.asarray((self.main < other.main) | ((self.main == other.main) & (self.tie < other.tie)))


def compute_criterion(scores: FloatArray, by: EarlyStopping) -> Criterion:
    """Compute the criterion of one round from validation rows, correctly classified rows, and sums of losses (3, E).

    By `accuracy`, wrong rows count, and losses where these are equal; by `loss`, losses alone.
    """
    n, correct, loss = scores
    loss = np.where(np.isfinite(loss), loss, np.inf)
    smooth_loss = _add_prior(n, loss)
    if by == "loss":
        return Criterion(smooth_loss, smooth_loss)
    # Sums of counts: rounding must not make two equal rounds differ.
    return Criterion(np.round(_add_prior(n, n - correct), 12), smooth_loss)


def _add_prior(n: FloatArray, total: FloatArray) -> FloatArray:
    mean = _bound(n, total).sum() / max(n.sum(), 1.0)
    return np.asarray((total + PRIOR_ROWS * mean) / (n + PRIOR_ROWS))


def compute_criterion_of_others(scores: FloatArray, by: EarlyStopping) -> Criterion:
    """Compute the criterion of one round from the rows of all other clients; arguments as for `compute_criterion`.

    A client's own rows flatter the round that they chose, most with methods whose rounds differ by chance. The round
    of the others gives an honest measure for the choice between methods.
    """
    n, correct, loss = scores

    def average_others(total: FloatArray) -> FloatArray:
        sums, rows = (one.sum() - one for one in (_bound(n, total), n))
        return np.asarray(np.round(sums / np.maximum(rows, 1.0), 12))

    return Criterion(average_others(loss if by == "loss" else n - correct), average_others(loss))


def have_others(n: FloatArray) -> bool:
    """Tell from the validation rows of each client (E,) whether every client has others that choose a round for it."""
    return int((n > 0).sum()) >= 2


def pick_by_others(scores: Sequence[FloatArray], by: EarlyStopping) -> FloatArray | None:
    """Pick the scores of each client (3, E) at the round that the other clients' rows choose.

    None if rounds are not judged, or fewer than two clients have rows.
    """
    if by == "off" or not len(scores) or not have_others(scores[0][0]):
        return None
    rule = StoppingRule(by, compute_criterion_of_others)
    for r, one in enumerate(scores):
        rule.add_round(r, one)
    return np.asarray(np.stack(scores, axis=1)[:, rule.rounds, np.arange(len(rule.rounds))])


def _bound(n: FloatArray, total: FloatArray) -> FloatArray:
    """Bound what each client adds to the mean over clients, so that all of them count in every round."""
    return np.asarray(np.minimum(np.where(np.isfinite(total), total, np.inf), MAX_ROW_LOSS * n))


@dataclass
class StoppingRule:
    """Remember the best round of each client so far; `off` judges the last one."""

    by: EarlyStopping
    criterion: Callable[[FloatArray, EarlyStopping], Criterion] = compute_criterion
    rounds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The best round of each client (E,); empty before the first evaluation."""
    best: Criterion | None = None

    def add_round(self, r: int, scores: FloatArray | None) -> NDArray[np.bool_] | None:
        """Judge an evaluated round by scores (3, E) as for `compute_criterion`, None without validation data.

        Return for which clients (E,) the round is the best so far; None if rounds are not judged.
        """
        if self.by == "off" or scores is None or not scores[0].sum():
            return None
        criterion = self.criterion(scores, self.by)
        if self.best is None:
            self.rounds = np.full(scores.shape[1], r)
            self.best = criterion
            return np.ones(scores.shape[1], dtype=np.bool_)
        better = criterion.is_better_than(self.best)
        self.rounds = np.where(better, r, self.rounds)
        self.best = Criterion(*(np.where(better, new, old) for new, old in zip(criterion, self.best, strict=True)))
        return better

    def add_rounds(self, scores: Iterable[tuple[int, str, FloatArray]], point: str) -> None:
        """Judge the rounds of a store at one point, in order: round, point, and (3, E) as for `compute_criterion`."""
        for r, scored_point, values in scores:
            if scored_point == point:
                self.add_round(r, values)
