"""Notes on predictions that are hardly any, and on curves that still move."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.metrics import METRICS, MetricName
from .compare import average_clients, get_default_metric, group_by_algorithm

if TYPE_CHECKING:
    from ..training.metrics import RunMetrics
    from ..training.predictions import RowPredictions
    from .baseline import Baseline

CONSTANT_BASELINES = ("majority", "mean")
"""Names of the baselines that predict one value for each client."""
CONSTANT_SHARE = 0.99
"""Share of one class among the predictions from which on these are called nearly constant."""
CONSTANT_SPREAD = 0.05
"""Deviation of predicted numbers, relative to the deviation of the true ones, below which they are called so."""
IMBALANCED_SHARE = 0.75
"""Share of one class from which on accuracy says little."""
MOVING_POINTS = 0.5
"""Change of the mean validation metric over the last fifth of the rounds from which on a curve still moves."""


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


def _note_moving(results: "Sequence[RunMetrics]") -> list[str]:
    """Name the methods whose validation curve still rises or falls at the end, so that other rounds could be better."""
    notes = []
    for name, runs in group_by_algorithm(results).items():
        changes = [change for run in runs if (change := _measure_drift(run)) is not None]
        if changes and abs(drift := float(np.mean(changes))) >= MOVING_POINTS:
            way = (
                "still gets better: more rounds may help"
                if drift > 0
                else "gets worse: fewer rounds are enough"
            )
            curve = runs[0].curve_metric
            size = f"{drift:+.1f} points" if curve.is_percent else f"by {abs(drift):.1f}%"
            notes.append(f"{name}: validation {curve.label} {way} ({size} over the last fifth of the rounds)")
    return notes


def _measure_drift(run: "RunMetrics") -> float | None:
    """Return how much better validation data find the last fifth of the rounds than the fifth before it.

    In points of accuracy, or in percent of the RMSE; 0 if noise explains the change.
    """
    curve = [run.read_curve(e["validation"][run.headline]) for e in run.history if e.get("validation")]
    n = len(curve) // 5
    if n < 2:
        return None
    last, before = np.array(curve[-n:]), np.array(curve[-2 * n : -n])
    drift = run.curve_metric.sign * float(last.mean() - before.mean())
    noise = float(np.sqrt((last.var() + before.var()) / n))
    unit = 1.0 if run.curve_metric.is_percent else max(float(before.mean()), np.finfo(float).tiny) / 100
    return drift / unit if abs(drift) > 3 * noise else 0.0
