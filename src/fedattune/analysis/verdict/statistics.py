"""Statistics of a comparison: the interval of a mean gain, tests of single clients' losses, and their correction.

`python -m benchmarks verdict` is the study by which the interval was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.metrics import CALIBRATION_BINS, compute_metrics, compute_row_losses, find_calibration_gaps

FloatArray = NDArray[np.float64]

if TYPE_CHECKING:
    from ...runs.predictions import RowPredictions

MIN_CLIENTS = 6
"""Clients below which splits, if there are MIN_SPLITS, say more about a mean gain than the clients do."""
MIN_SPLITS = 3
"""Splits from which the spread over splits is known well enough for an interval."""
MIN_CLASS_ROWS = 10
"""Test rows of a class below which the influences of single rows say little of the spread of a metric."""
MAX_SWAPPED_ROWS, MAX_SWAPS_SIZE = 20_000, 2_000_000


@dataclass(frozen=True)
class MeanGain:
    """The weighted mean gain over clients.

    Attributes:
        mean: the mean.
        error: its standard error; infinite if it is not known.
        df: degrees of freedom of the t distribution of mean / error.
        over: what the error was estimated from.
    """

    mean: float
    error: float
    df: float
    over: Literal["clients", "splits"]

    def compute_interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Compute the t interval at a level; None if the error is not known."""
        from scipy.special import stdtrit

        if not np.isfinite(self.error):
            return None
        half = float(stdtrit(self.df, (1 + level) / 2)) * self.error
        return self.mean - half, self.mean + half


def estimate_mean(gains: FloatArray, weights: FloatArray, test_share: float) -> MeanGain:
    """Estimate the mean gain over clients from gains (K, N) of K random splits of the same rows; NaN if not known.

    The error is the spread over clients of the gains averaged over splits, with client weights (N,). For fewer than
    MIN_CLIENTS clients and at least MIN_SPLITS splits that are not all alike, it is the spread over splits, corrected
    for the rows that splits share: Nadeau and Bengio, Inference for the Generalization Error, Machine Learning 52,
    2003, equation 7. If fewer than MIN_CLIENTS clients gain the same, the error is not known.
    """
    known = np.isfinite(gains)
    is_counted = known.any(axis=0) & (weights > 0)
    gains, known, weights = gains[:, is_counted], known[:, is_counted], weights[is_counted]
    if not len(weights):
        return MeanGain(np.nan, np.inf, 1.0, "clients")
    filled = np.where(known, gains, 0.0)
    by_client, total = filled.sum(axis=0) / known.sum(axis=0), float(weights.sum())
    mean = float(weights @ by_client) / total
    by_split = [float(np.average(g[k], weights=weights[k])) for g, k in zip(gains, known, strict=True) if k.any()]
    is_alike = not np.ptp(by_split) > 1e-9 * abs(mean)  # by chance, as few rows have few accuracies
    if len(weights) < MIN_CLIENTS and len(by_split) >= MIN_SPLITS and not is_alike:
        n = len(by_split)
        variance = float(np.var(by_split, ddof=1)) * (1 / n + test_share / (1 - test_share))
        return MeanGain(mean, variance**0.5, n - 1.0, "splits")
    n_effective = total**2 / float(weights @ weights)
    if n_effective < 1 + 1e-9:
        return MeanGain(mean, np.inf, 1.0, "clients")
    if mean and len(weights) < MIN_CLIENTS and np.ptp(by_client) <= 1e-9 * abs(mean):
        return MeanGain(mean, np.inf, 1.0, "clients")
    spread = float(weights**2 @ (by_client - mean) ** 2) / total**2
    return MeanGain(mean, (spread * n_effective / (n_effective - 1)) ** 0.5, n_effective - 1, "clients")


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values of several tests by Holm's method, in their order."""
    order = np.argsort(p_values)
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[int(i)] = largest
    return adjusted


def compute_row_p(mine: "RowPredictions", other: "RowPredictions", client: int, metric: str) -> float:
    """Compute the probability that chance alone makes a client lose as much as it does, from its test rows.

    Rows that one model gets right and the other wrong are decided by a coin: the exact sign test (McNemar). Of
    numbers, of several labels or positions, and of log loss, Wilcoxon's test compares the rows' errors. AUC, balanced
    accuracy and F1 are no means over rows; a t test compares the influence of each row on them (for AUC: DeLong et al.,
    Biometrics 44, 1988). Where a class has few rows, the influences do not show their spread, and the two models' rows
    are swapped at random, and so they are for the calibration error.
    """
    # Of scipy.stats, whose import takes a third of a second, only what scipy.special lacks is imported, where it acts.
    from scipy.special import bdtrc, stdtr

    rows = mine.rows(client)
    if metric == "calibration_error":
        found = [find_calibration_gaps(one.y[rows], one.outputs[rows].astype(np.float64)) for one in (mine, other)]
        return _compute_calibration_p(*found)
    if metric in ("auc", "balanced_accuracy", "f1"):
        both = [(one.y[rows].astype(np.int64), one.outputs[rows].astype(np.float64)) for one in (mine, other)]
        counts = np.unique(both[0][0], return_counts=True)[1]
        if counts.min() < MIN_CLASS_ROWS and len(both[0][0]) <= MAX_SWAPPED_ROWS:
            return _compute_swap_p(both[0][0], both[0][1], both[1][1], metric)
        gap = compute_metrics(*both[0], [metric])[metric] - compute_metrics(*both[1], [metric])[metric]
        influence = compute_influences(*both[0], metric) - compute_influences(*both[1], metric)
        error = float(np.sqrt((influence**2).sum())) / max(1, len(influence))
        if np.isfinite(gap) and error > 0:
            return float(stdtr(max(1, len(influence) - 1), gap / error))
    losses = [compute_row_losses(one.y[rows], one.outputs[rows].astype(np.float64), metric) for one in (mine, other)]
    with np.errstate(invalid="ignore"):
        difference = losses[0] - losses[1]
    difference = difference[(difference != 0) & ~np.isnan(difference)]  # of two models that both diverged
    if not len(difference):
        return 1.0
    if mine.kind == "class" and metric != "log_loss":  # elsewhere, rows are partly right
        return float(bdtrc((difference > 0).sum() - 1, len(difference), 0.5))
    from scipy.stats import wilcoxon

    return float(wilcoxon(difference, alternative="greater", method="asymptotic").pvalue)


def _compute_calibration_p(
    mine: tuple[NDArray[np.int64], FloatArray], other: tuple[NDArray[np.int64], FloatArray]
) -> float:
    """Swap the two models' rows at random, of which `find_calibration_gaps` gives bins and gaps (n,)."""
    n = len(mine[0])
    is_swapped = _draw_swaps(n)
    first = CALIBRATION_BINS * np.arange(len(is_swapped))[:, None]
    errors = []
    for one, two in ((mine, other), (other, mine)):
        bins, gaps = (np.where(is_swapped, b, a) for a, b in zip(one, two, strict=True))
        sums = np.bincount((first + bins).ravel(), gaps.ravel(), CALIBRATION_BINS * len(is_swapped))
        errors.append(np.abs(sums.reshape(-1, CALIBRATION_BINS)).sum(axis=1))
    gains = errors[1] - errors[0]
    return float((gains <= gains[0] + 1e-12).mean()) if np.isfinite(gains[0]) else 1.0


def _draw_swaps(n: int) -> NDArray[np.bool_]:
    """Draw which of n rows are swapped, (1 + swaps, n); the first row is what is observed."""
    is_swapped = np.random.default_rng(0).random((1 + min(999, MAX_SWAPS_SIZE // n), n)) < 0.5
    is_swapped[0] = False
    return is_swapped


def _compute_swap_p(y: NDArray[np.int64], mine: FloatArray, other: FloatArray, metric: str) -> float:
    from scipy.special import logsumexp
    from scipy.stats import rankdata

    is_swapped = _draw_swaps(len(y))
    gaps, predicted = np.zeros(len(is_swapped)), (mine.argmax(axis=1), other.argmax(axis=1))
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
