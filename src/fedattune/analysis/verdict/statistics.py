"""Statistics of a comparison: intervals over clients, splits and test rows, paired tests, and their correction."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...core.metrics import METRICS, compute_metrics, compute_row_losses

FloatArray = NDArray[np.float64]

if TYPE_CHECKING:
    from ...runs.predictions import RowPredictions

MIN_CLIENTS = 6
"""Clients below which resampling them, or a rank test over them, says nothing; test rows are resampled instead."""
N_RESAMPLES = 10_000
MAX_DRAWN_ROWS = 10_000_000
"""Maximum number of rows in the resamples of one client, so that large clients take seconds."""
MIN_CLASS_ROWS = 10
"""Test rows of a class below which the influences of single rows say little of the spread of a metric."""
MAX_SWAPPED_ROWS, MAX_SWAPS_SIZE = 20_000, 2_000_000
N_ROW_RESAMPLES = 2_000
"""Resamples of test rows for a metric that is a mean over rows; other metrics get a fifth of them."""


def bootstrap_interval(gains: FloatArray) -> tuple[float, float]:
    """Compute the 95% bootstrap interval of the mean over clients; the same gains (N,) give the same interval."""
    generator = np.random.default_rng(0)
    chunk = max(1, 1_000_000 // len(gains))  # bounds memory for many clients
    resamples = N_RESAMPLES if len(gains) <= 1000 else N_RESAMPLES // 5
    means: list[float] = []
    while len(means) < resamples:
        picks = generator.integers(len(gains), size=(min(chunk, resamples - len(means)), len(gains)))
        means += gains[picks].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def compute_split_interval(gains: Sequence[float], test_share: float) -> tuple[float, float] | None:
    """Compute the 95% interval of the mean gain over random splits of the same rows; None for fewer than two splits.

    The splits share rows, so their gains vary less than gains on new rows would. The variance is corrected for that:
    Nadeau and Bengio, Inference for the Generalization Error, Machine Learning 52, 2003, equation 7.
    """
    from scipy.stats import t

    n = len(gains)
    if n < 2:
        return None
    variance = float(np.var(gains, ddof=1)) * (1 / n + test_share / (1 - test_share))
    half, mean = float(t.ppf(0.975, n - 1)) * np.sqrt(variance), float(np.mean(gains))
    return mean - half, mean + half


def compute_wilcoxon_p(gains: FloatArray) -> float:
    """Compute the two-sided p value of Wilcoxon's signed-rank test that gains (N,) are symmetric around 0."""
    from scipy.stats import wilcoxon

    gains = gains[gains != 0]
    if not len(gains):
        return 1.0
    # The exact distribution does not hold with ties, and is slow for many clients.
    has_ties = len(np.unique(np.abs(gains))) < len(gains)
    return float(wilcoxon(gains, method="asymptotic" if has_ties or len(gains) > 50 else "exact").pvalue)


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values of several tests by Holm's method, in their order."""
    order = np.argsort(p_values)
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[int(i)] = largest
    return adjusted


def resample_rows(pairs: "Sequence[tuple[RowPredictions, RowPredictions]]", metric: str) -> tuple[float, float]:
    """Compute the 95% bootstrap interval of the mean gain of *these* clients over new test rows.

    Rows are drawn within each client. A row that is in the test part of several splits counts in all of them as often
    as it is drawn. Each pair is of one seed and split: the method and its reference for the same rows.
    """
    is_mean = metric in ("accuracy", "log_loss", "mae", "rmse")
    draws, max_rows = (N_ROW_RESAMPLES, MAX_DRAWN_ROWS) if is_mean else (N_ROW_RESAMPLES // 5, MAX_DRAWN_ROWS // 5)
    n_rows = max(int(np.bincount(mine.client).max(initial=1)) for mine, _ in pairs)
    draws = max(100, min(draws, max_rows // n_rows))  # many rows need few draws for their interval
    gap = _measure_means if is_mean else _measure_whole
    per_client = [
        gains
        for client in range(pairs[0][0].n_clients)
        if (gains := _resample_client(pairs, client, metric, draws, gap)) is not None
    ]
    means = METRICS[metric].sign * np.nanmean(per_client, axis=0)
    low, high = np.nanpercentile(means, [2.5, 97.5])
    return float(low), float(high)


Gap = Callable[["RowPredictions", "RowPredictions", slice, FloatArray, str], FloatArray]


def _resample_client(
    pairs: "Sequence[tuple[RowPredictions, RowPredictions]]", client: int, metric: str, draws: int, gap: Gap
) -> FloatArray | None:
    """Return the differences (draws,) of one client's metric, averaged over the pairs; None without test rows."""
    generator = np.random.default_rng([0, client])
    own = [mine.rows(client) for mine, _ in pairs]
    samples, places = np.unique(
        np.concatenate([mine.sample[rows] for (mine, _), rows in zip(pairs, own, strict=True)]), return_inverse=True
    )
    if not len(samples):
        return None
    stops = np.cumsum([rows.stop - rows.start for rows in own])
    parts = np.split(places, stops[:-1])
    means: list[FloatArray] = []
    chunk = max(1, MAX_DRAWN_ROWS // 10 // len(samples))  # bounds memory for many rows
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        counts = generator.multinomial(len(samples), np.full(len(samples), 1 / len(samples)), size=size)
        differences = [
            gap(mine, other, rows, counts[:, part].astype(np.float64), metric)
            for (mine, other), rows, part in zip(pairs, own, parts, strict=True)
        ]
        means.append(np.nanmean(differences, axis=0))
    return np.concatenate(means)


def _measure_means(
    mine: "RowPredictions", other: "RowPredictions", rows: slice, counts: FloatArray, metric: str
) -> FloatArray:
    """Return differences (draws,) of a metric that is a mean over rows, where `counts` (draws, n) weigh the rows."""
    values = []
    for one in (mine, other):
        losses = compute_row_losses(one.y[rows], one.outputs[rows].astype(np.float64), metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = counts @ losses / counts.sum(axis=1)
        values.append({"accuracy": 1 - mean, "rmse": np.sqrt(mean)}.get(metric, mean))
    difference: FloatArray = values[0] - values[1]
    return difference


def _measure_whole(
    mine: "RowPredictions", other: "RowPredictions", rows: slice, counts: FloatArray, metric: str
) -> FloatArray:
    """Return differences (draws,) of any metric, from rows repeated as often as `counts` (draws, n) say."""
    values = np.full((2, len(counts)), np.nan)
    for i, one in enumerate((mine, other)):
        y, outputs = one.y[rows], one.outputs[rows].astype(np.float64)
        for k, times in enumerate(counts.astype(np.int64)):
            index = np.repeat(np.arange(len(y)), times)
            values[i, k] = compute_metrics(y[index], outputs[index], [metric])[metric] if len(index) else np.nan
    difference: FloatArray = values[0] - values[1]
    return difference


def compute_row_p(mine: "RowPredictions", other: "RowPredictions", client: int, metric: str) -> float:
    """Compute the probability that chance alone makes a client lose as much as it does, from its test rows.

    Rows that one model gets right and the other wrong are decided by a coin: the exact sign test (McNemar). Of
    numbers and of log loss, Wilcoxon's test compares the rows' errors. AUC, balanced accuracy and F1 are no means over
    rows; a t test compares the influence of each row on them (for AUC: DeLong et al., Biometrics 44, 1988). Where a
    class has few rows, the influences do not show their spread, and the two models' rows are swapped at random.
    """
    from scipy.stats import binomtest, t, wilcoxon

    rows = mine.rows(client)
    if metric in ("auc", "balanced_accuracy", "f1"):
        both = [(one.y[rows].astype(np.int64), one.outputs[rows].astype(np.float64)) for one in (mine, other)]
        counts = np.unique(both[0][0], return_counts=True)[1]
        if counts.min() < MIN_CLASS_ROWS and len(both[0][0]) <= MAX_SWAPPED_ROWS:
            return _compute_swap_p(both[0][0], both[0][1], both[1][1], metric)
        gap = compute_metrics(*both[0], [metric])[metric] - compute_metrics(*both[1], [metric])[metric]
        influence = compute_influences(*both[0], metric) - compute_influences(*both[1], metric)
        error = float(np.sqrt((influence**2).sum())) / max(1, len(influence))
        if np.isfinite(gap) and error > 0:
            return float(t.cdf(gap / error, max(1, len(influence) - 1)))
    losses = [compute_row_losses(one.y[rows], one.outputs[rows].astype(np.float64), metric) for one in (mine, other)]
    difference = losses[0] - losses[1]
    difference = difference[difference != 0]
    if not len(difference):
        return 1.0
    if METRICS[metric].is_for_classes and metric != "log_loss":
        return float(binomtest(int((difference > 0).sum()), len(difference), 0.5, "greater").pvalue)
    return float(wilcoxon(difference, alternative="greater", method="asymptotic").pvalue)


def _compute_swap_p(y: NDArray[np.int64], mine: FloatArray, other: FloatArray, metric: str) -> float:
    from scipy.special import logsumexp
    from scipy.stats import rankdata

    n_swaps = min(999, MAX_SWAPS_SIZE // len(y))
    is_swapped = np.random.default_rng(0).random((1 + n_swaps, len(y))) < 0.5
    is_swapped[0] = False  # what is observed
    gaps, predicted = np.zeros(1 + n_swaps), (mine.argmax(axis=1), other.argmax(axis=1))
    for label in range(mine.shape[1]):
        is_own = y == label
        n_own = int(is_own.sum())
        # What one row says of this class; ranks, because the two models' logits have no common scale.
        said = [
            rankdata(one[:, label] - logsumexp(np.delete(one, label, axis=1), axis=1))
            if metric == "auc"
            else (guess == label).astype(np.float64)
            for one, guess in zip((mine, other), predicted, strict=True)
        ]
        if n_own == 0 or (metric == "auc" and n_own == len(y)):
            continue
        first, second = (np.where(is_swapped, said[k], said[1 - k]) for k in (1, 0))
        for sign, one in ((1, first), (-1, second)):
            if metric == "auc":
                gaps += sign * rankdata(one, axis=1)[:, is_own].mean(axis=1) / (len(y) - n_own)
            elif metric == "balanced_accuracy":
                gaps += sign * one[:, is_own].mean(axis=1)
            else:
                gaps += sign * 2 * one[:, is_own].sum(axis=1) / (n_own + one.sum(axis=1))
    return float((gaps <= gaps[0] + 1e-12).mean())


def compute_influences(y: NDArray[np.int64], outputs: FloatArray, metric: str) -> FloatArray:
    """Compute how much each row (n,) moves a mean over classes; the variance of the mean is their mean square / n."""
    n, predicted = len(y), outputs.argmax(axis=1)
    total, n_counted = np.zeros(n), 0
    for label in range(outputs.shape[1]):
        is_own, is_said = y == label, predicted == label
        n_own, n_said = int(is_own.sum()), int(is_said.sum())
        if metric == "f1" and n_own + n_said:
            hits = (is_own & is_said).astype(np.float64)
            f1 = 2 * hits.sum() / (n_own + n_said)
            total += n * (2 * hits - f1 * (is_own.astype(np.float64) + is_said)) / (n_own + n_said)
        elif metric == "balanced_accuracy" and n_own:
            total += n * is_own * (is_said - is_said[is_own].mean()) / n_own
        elif metric == "auc" and 0 < n_own < n:
            total += n * _compute_auc_influence(is_own, outputs, label)
        else:
            continue
        n_counted += 1
    return total / max(1, n_counted)


def _compute_auc_influence(is_own: NDArray[np.bool_], outputs: FloatArray, label: int) -> FloatArray:
    """Compute each row's part of the AUC of one class against all others, around 0 (n,)."""
    from scipy.special import logsumexp
    from scipy.stats import rankdata

    score = outputs[:, label] - logsumexp(np.delete(outputs, label, axis=1), axis=1)
    n_own, n_others = int(is_own.sum()), int((~is_own).sum())
    ranks, share = rankdata(score), np.zeros(len(score))
    # The share of the other side's rows on which this row is on the right side.
    share[is_own] = (ranks[is_own] - rankdata(score[is_own])) / n_others
    share[~is_own] = 1 - (ranks[~is_own] - rankdata(score[~is_own])) / n_own
    influence: FloatArray = (share - share[is_own].mean()) / np.where(is_own, n_own, n_others)
    return influence
