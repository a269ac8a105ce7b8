"""Measure many clients at once: what `core.metrics` computes of one client's rows, with equal results.

A federation of 2,000 clients has ten thousands of parts to measure, and small NumPy calls take longer than their work.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import CALIBRATION_BINS, compute_probabilities, compute_row_losses, find_calibration_gaps

Counts = NDArray[np.int64]
Values = NDArray[np.float64]

ClientMeasure = Callable[[Counts, NDArray[np.generic], Values], Values]
"""measure(starts, y, outputs) -> value of each client (E,), NaN where its rows do not define the metric.

`starts` (E + 1,) are the first row of each client, and the number of rows; `y` and `outputs` are as for a `Measure`.
"""


def _average_rows(metric: str) -> ClientMeasure:
    def measure(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
        losses = compute_row_losses(y, outputs, metric)
        parts = np.split(losses, starts[1:-1])
        return np.array([part.mean() if len(part) else np.nan for part in parts])

    return measure


def _measure_accuracy(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    right = np.concatenate([[0], (outputs.argmax(axis=1) == y).cumsum()])
    return np.diff(right[starts]) / np.diff(starts)


def _measure_balanced_accuracy(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    hits, rows, _ = _count_hits(starts, y, outputs)
    return _average_known(hits / rows)


def _measure_f1(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    hits, rows, columns = _count_hits(starts, y, outputs)
    return _average_known(2 * hits / (rows + columns))


def _measure_rmse(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    return np.sqrt(_average_rows("rmse")(starts, y, outputs))


def _measure_calibration_error(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    n_clients, sizes = len(starts) - 1, np.diff(starts)
    bins, gaps = find_calibration_gaps(y, outputs)
    keys = CALIBRATION_BINS * np.repeat(np.arange(n_clients), sizes) + bins
    sums = np.bincount(keys, gaps, n_clients * CALIBRATION_BINS).reshape(n_clients, CALIBRATION_BINS)
    return np.asarray(np.abs(sums).sum(axis=1) / sizes)


def _measure_auc(starts: Counts, y: NDArray[np.generic], outputs: Values) -> Values:
    """Measure by ranks: of n rows of a class, whose ranks have the sum r, r - n (n + 1) / 2 pairs are in order."""
    n_clients, sizes = len(starts) - 1, np.diff(starts)
    small = np.min_scalar_type(n_clients)  # NumPy sorts small types faster
    owner = np.repeat(np.arange(n_clients, dtype=small), sizes)
    scores, classes = compute_probabilities(outputs), range(outputs.shape[1])
    if outputs.shape[1] == 2:  # as in `core.metrics.auc`
        scores, classes = (outputs[:, 1] - outputs[:, 0])[:, None].repeat(2, axis=1), range(1, 2)
    areas = np.full((n_clients, len(classes)), np.nan)
    for column, label in enumerate(classes):
        n = np.bincount(owner[y == label], minlength=n_clients)
        has_both = (n > 0) & (n < sizes)
        rows = np.flatnonzero(has_both[owner])
        if not len(rows):
            continue
        mine, score = owner[rows], scores[rows, label]
        order = np.argsort(score, kind="stable")
        order = order[np.argsort(mine[order], kind="stable")]
        is_new = np.ones(len(rows), dtype=np.bool_)
        is_new[1:] = (np.diff(score[order]) != 0) | (mine[1:] != mine[:-1])
        group = is_new.cumsum() - 1
        n_before = (sizes * has_both).cumsum() - sizes * has_both
        ranks = np.empty(len(rows))
        ranks[order] = (np.flatnonzero(is_new) + (np.bincount(group) + 1) / 2)[group] - n_before[mine]
        is_own = y[rows] == label
        pairs = 2 * np.bincount(mine[is_own], ranks[is_own], n_clients) - n * (n + 1)
        areas[has_both, column] = (pairs / np.maximum(2 * n * (sizes - n), 1))[has_both]
    diverged = np.unique(owner[~np.isfinite(outputs).all(axis=1)])
    areas[diverged] = np.nan
    return _average_known(areas)


def _count_hits(starts: Counts, y: NDArray[np.generic], outputs: Values) -> tuple[Counts, Counts, Counts]:
    """Count, for each client and class (E, classes), the right predictions, the rows, and the predictions."""
    n_clients, n_classes = len(starts) - 1, outputs.shape[1]
    first = n_classes * np.repeat(np.arange(n_clients), np.diff(starts))
    y, predicted = y.astype(np.int64), outputs.argmax(axis=1)
    keys = (first + y)[predicted == y], first + y, first + predicted
    hits, rows, columns = (
        np.bincount(key, minlength=n_clients * n_classes).reshape(n_clients, n_classes) for key in keys
    )
    return hits, rows, columns


def _average_known(values: Values) -> Values:
    """Average what is known of each row (E, classes); not by one sum, which would round otherwise."""
    known = ~np.isnan(values)
    return np.array([row[one].mean() if one.any() else np.nan for row, one in zip(values, known, strict=True)])


CLIENT_MEASURES: Mapping[str, ClientMeasure] = {
    "accuracy": _measure_accuracy,
    "balanced_accuracy": _measure_balanced_accuracy,
    "auc": _measure_auc,
    "f1": _measure_f1,
    "log_loss": _average_rows("log_loss"),
    "calibration_error": _measure_calibration_error,
    "mae": _average_rows("mae"),
    "rmse": _measure_rmse,
}
"""Metric -> how it is measured of all clients at once. Other metrics, such as custom ones, are measured one by one."""
