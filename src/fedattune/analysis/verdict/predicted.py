"""Notes on predictions that are hardly any, and on curves that still move."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.metrics import METRICS, MetricName
from ...data.federated import IMBALANCED_SHARE
from ..compare import average_clients, get_default_metric, group_by_algorithm

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics
    from ...runs.predictions import RowPredictions
    from .baseline import Baseline

CONSTANT_BASELINES = ("majority", "mean")
"""Names of the baselines that predict one value for each client."""
CONSTANT_SHARE = 0.99
"""Share of one class among the predictions above which they are called nearly constant."""
CONSTANT_SPREAD = 0.05
"""Deviation of predicted numbers, relative to the deviation of the true ones, below which they are called so."""
UNIT_RATIO = 10.0
"""Ratio of the target's deviations at two clients above which their errors differ in size."""
MIN_EVALUATIONS = 4
"""Evaluations below which a curve is too short to say that it moves."""
MOVING_SHARE = 0.02
"""Relative change of a validation RMSE above which a curve still moves."""
MOVING_POINTS = 0.005
"""Change of the mean validation metric over the last fifth of the rounds above which a curve still moves."""


def write_prediction_notes(
    results: "Sequence[RunMetrics]", baselines: "Sequence[Baseline]" = (), metric: MetricName | None = None
) -> list[str]:
    """Say which methods predict nearly one value, which are below the constant baseline, and which still move.

    Args:
        results: runs on the same clients.
        baselines: baselines on the same clients.
        metric: the metric of the verdict.
    """
    notes = _note_imbalance(results, metric)
    for name, runs in group_by_algorithm(results).items():
        if (predictions := runs[0].predictions.get("test")) is not None:
            notes += _note_constant(name, predictions, runs[0].facts["classes"])
    notes += _note_below_constant(results, baselines, metric or get_default_metric(results))
    notes += _note_units(results, metric or get_default_metric(results))
    return [*notes, *_note_moving(results)]


def _note_imbalance(results: "Sequence[RunMetrics]", metric: MetricName | None) -> list[str]:
    labels = results[0].facts.get("labels") if results else None
    if not labels or metric not in (None, "accuracy"):
        return []
    totals = np.array(labels).sum(axis=0)
    share = totals.max() / max(totals.sum(), 1)
    if share < IMBALANCED_SHARE:
        return []
    return [
        f"{100 * share:.0f}% of all rows are of class {results[0].facts['classes'][int(totals.argmax())]!r}, so "
        "accuracy says little; --metric auc or balanced_accuracy says more"
    ]


def _note_constant(name: str, predictions: "RowPredictions", classes: Sequence[str]) -> list[str]:
    if predictions.is_regression:
        spread = float(predictions.outputs.std()) / max(float(predictions.y.std()), 1e-12)
        if spread >= CONSTANT_SPREAD:
            return []
        return [
            f"{name} predicts nearly the same number everywhere: its predictions spread {100 * spread:.1g}% as far as "
            "the target"
        ]
    predicted = predictions.outputs.argmax(axis=1)
    counts = np.bincount(predicted, minlength=len(classes))
    top = int(counts.argmax())
    share, truth = counts[top] / len(predicted), float(np.mean(predictions.y == top))
    if share < CONSTANT_SHARE or share <= truth + 0.005:
        return []
    return [
        f"{name} predicts {classes[top]!r} for {100 * share:.1f}% of the test rows, of which {100 * truth:.1f}% are "
        "so: it hardly looks at the rows"
    ]


def _note_below_constant(
    results: "Sequence[RunMetrics]", baselines: "Sequence[Baseline]", metric: MetricName
) -> list[str]:
    constant = [one for one in baselines if one.name in CONSTANT_BASELINES]
    if not constant:
        return []
    measure = METRICS[metric]
    bar = float(np.nanmean(average_clients(constant, metric)))
    below = []
    for name, runs in group_by_algorithm(results).items():
        value = float(np.nanmean(average_clients(runs, metric)))
        if measure.sign * value < measure.sign * bar:
            below.append(f"{name} {measure.format(value)}")
    if not below:
        return []
    what = "the most frequent class" if measure.is_for_classes else "the mean"
    return [
        f"no better than {what} of each client's training rows ({measure.label} {measure.format(bar)}): "
        f"{', '.join(below)}"
    ]


def _note_units(results: "Sequence[RunMetrics]", metric: MetricName) -> list[str]:
    """Say that a mean of errors is the mean of few clients if the target varies far more at some than at others."""
    predictions = results[0].predictions.get("test") if results and METRICS[metric].has_unit else None
    if predictions is None:
        return []
    every = [predictions.y[predictions.rows(i)] for i in range(predictions.n_clients)]
    spreads = {i: float(np.std(y)) for i, y in enumerate(every) if len(y) > 1 and np.std(y) > 0}
    if not spreads or max(spreads.values()) < UNIT_RATIO * min(spreads.values()):
        return []
    low, high = min(spreads, key=spreads.__getitem__), max(spreads, key=spreads.__getitem__)
    names = [str(client["id"]) for client in results[0].facts["clients"]]
    return [
        f"the target varies {spreads[high] / spreads[low]:,.0f} times as far at client {names[high]} as at client "
        f"{names[low]}, so the mean {METRICS[metric].label} is that of few clients; --metric r2 counts all alike, and "
        "clients with different units should have a common one"
    ]


def _note_moving(results: "Sequence[RunMetrics]") -> list[str]:
    """Name the methods whose validation curve still rises or falls at the end, so that other rounds could be better."""
    notes = []
    for name, runs in group_by_algorithm(results).items():
        changes = [change for run in runs if (change := _measure_drift(run)) is not None]
        if not changes:
            continue
        drift, label, rises = float(np.mean(changes)), "accuracy", ("still rises", "falls")
        unit = "points"
        if runs[0].is_regression:
            label, rises, unit = "RMSE", ("rises", "still falls"), "%"
        if abs(drift) < (MOVING_SHARE if runs[0].is_regression else MOVING_POINTS):
            continue
        is_better = (drift > 0) != runs[0].is_regression
        way = rises[0 if drift > 0 else 1] + (
            ": more rounds may be better" if is_better else ": fewer rounds are enough"
        )
        n = min(sum(bool(e.get("validation")) for e in run.history) for run in runs)
        over = (
            "over the last fifth of the rounds" if n >= 10 else "from the evaluation before to the last one"
        )
        notes.append(
            f"{name}: validation {label} {way} ({100 * drift:+.1f}{' ' * (unit == 'points')}{unit} {over})"
        )
    return notes


def _measure_drift(run: "RunMetrics") -> float | None:
    """Return the change of the mean validation curve from the fifth before the last one to the last fifth."""
    points = [e["validation"][run.evaluation_point] for e in run.history if e.get("validation")]
    curve = [run.read_curve(e) if run.is_regression else e["acc_uniform"] for e in points]
    n = len(curve) // 5
    if len(curve) < MIN_EVALUATIONS or not np.isfinite(curve).all():
        return None
    if n < 2:  # two evaluations cannot show a drift; three in one direction can
        steps = np.diff(curve[-3:])
        size = float(curve[-2]) if run.is_regression else 1.0
        return float(steps[-1]) / size if (steps > 0).all() or (steps < 0).all() else 0.0
    last, before = np.array(curve[-n:]), np.array(curve[-2 * n : -n])
    size = float(before.mean()) if run.is_regression else 1.0
    drift = float(last.mean() - before.mean()) / size
    noise = float(np.sqrt((last.var() + before.var()) / n)) / size
    return drift if abs(drift) > 3 * noise else 0.0
