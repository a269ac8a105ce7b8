"""The choice of a method on validation data, in which every client counts as it does in the test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...core.metrics import METRICS, MetricName
from ...data.splits import validation_weights
from ..compare import BASELINE, Contestant, FloatArray, average_clients

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics

MIN_DEFINED_SHARE = 0.5
"""Share of the clients' weight with a metric of their own below which all validation rows are measured together."""


@dataclass(frozen=True)
class Choice:
    """The scores by which methods are chosen.

    Attributes:
        scores: name -> score, the larger the better.
        criterion: what the scores are, as a phrase after `by`.
        is_validated: whether validation data, not test data, gave them.
        n_validated: number of clients that have validation rows.
    """

    scores: Mapping[str, float]
    criterion: str
    is_validated: bool
    n_validated: int

    def find_best(self, names: Sequence[str]) -> str:
        """Return the best of some names; of equally good ones the first."""
        return max(names, key=self.scores.__getitem__)


def weigh_clients(run: "RunMetrics") -> FloatArray:
    """Return weights (E,) with which a mean over clients with validation rows stands for all clients.

    A client too small for a validation row of its own has one by chance; it then counts for all clients of its size.
    """
    clients = run.facts["clients"]
    n_train, n_validation = (
        np.array([one.get(key, 0) for one in clients]) for key in ("n_train", "n_validation")
    )
    share = run.config.get("partition", {}).get("fractions", {}).get("validation")
    if share is None:  # parts that the user made
        return (n_validation > 0).astype(np.float64)
    return validation_weights(n_train, n_validation, float(share))


def score_methods(
    groups: Mapping[str, Sequence[Contestant]], runs: "Sequence[RunMetrics]", metric: MetricName
) -> Choice:
    """Score every method and baseline on validation data; on test data if there are no validation data.

    Args:
        groups: name -> its runs.
        runs: runs that know the sizes of the clients, of every split.
        metric: the metric that decides.
    """
    measure = METRICS[metric]
    weights = {run.split: weigh_clients(run) for run in runs}
    shared = {split: np.ones(len(one), dtype=bool) for split, one in weights.items()}
    n_validated = min(int((one > 0).sum()) for one in weights.values())
    has_rows = all(
        (~np.isnan(one.measure_for_choice(metric)[weights[one.split] > 0])).any()
        for group in groups.values()
        for one in group
    )
    if not n_validated or not has_rows:
        scores = {
            name: measure.sign * _mean(average_clients(group, metric)) for name, group in groups.items()
        }
        reason = f"test {measure.label}, there being no validation data, which favours the method chosen"
        return Choice(scores, reason, False, 0)
    every = [one for group in groups.values() for one in group]
    # A client on which one method has no value counts for no method; an infinite loss is a value.
    for one in every:
        is_defined = ~np.isnan(one.measure_for_choice(metric))
        if "validation" in one.predictions and (is_defined & (weights[one.split] > 0)).any():
            shared[one.split] = shared[one.split] & is_defined
    shared = {
        split: one if (one & (weights[split] > 0)).any() else np.ones_like(one)
        for split, one in shared.items()
    }
    is_own = all(_is_defined(one, metric, weights[one.split]) for one in every)
    scores = {
        name: measure.sign
        * float(
            np.mean(
                [
                    _measure_validation(
                        one, metric, np.where(shared[one.split], weights[one.split], 0.0), is_own=is_own
                    )
                    for one in group
                ]
            )
        )
        for name, group in groups.items()
    }
    criterion = f"validation {measure.label}" + ("" if is_own else " of all rows together")
    return Choice(scores, criterion, True, n_validated)


def _is_defined(one: Contestant, metric: MetricName, weights: FloatArray) -> bool:
    """Check that enough clients have their own value; without predictions, every known value is a client's own."""
    values = one.measure_for_choice(metric)
    known = weights[~np.isnan(values)].sum()
    return bool(known >= MIN_DEFINED_SHARE * weights.sum()) or "validation" not in one.predictions


def _measure_validation(one: Contestant, metric: MetricName, weights: FloatArray, *, is_own: bool) -> float:
    if not is_own and "validation" in one.predictions:
        return one.predictions["validation"].pooled[metric]
    values = one.measure_for_choice(metric)
    known = ~np.isnan(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")


def _mean(values: FloatArray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def find_excluded(groups: "Mapping[str, Sequence[RunMetrics]]") -> dict[str, str]:
    """Find the methods that cannot show whether collaborating helps, and the reason of each.

    A method is excluded if it shared nothing, or trained for longer than `local`.
    """
    steps = count_steps(groups)
    excluded = {}
    for name, runs in groups.items():
        if name == BASELINE or BASELINE not in groups:
            continue
        if not any(run.bytes_up for run in runs):
            excluded[name] = "shared nothing"
        elif steps[name] > MAX_STEPS_RATIO * steps[BASELINE]:
            excluded[name] = (
                f"did {steps[name]:,.0f} local steps per client where local did {steps[BASELINE]:,.0f}"
            )
    return excluded


MAX_STEPS_RATIO = 1.05
"""Local steps of a method per local step of `local`; the comparison is not fair above this ratio."""


def count_steps(groups: "Mapping[str, Sequence[RunMetrics]]") -> dict[str, float]:
    """Count the local steps per client of each method."""
    return {name: float(np.mean([run.local_steps for run in runs])) for name, runs in groups.items()}
