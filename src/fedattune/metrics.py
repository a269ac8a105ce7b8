"""From per-client scores to the numbers that are reported."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Metrics = dict[str, float]
"""acc_uniform, acc_pooled, acc_std, acc_worst10, loss_uniform; accuracies are fractions."""


def summarise(n: NDArray[np.int64], correct: NDArray[np.int64], loss: NDArray[np.float64]) -> Metrics:
    """Numbers over clients from samples, right answers and summed losses, each (N,).

    `acc_uniform` weighs every client alike, `acc_pooled` every sample; `acc_std` is the population standard
    deviation over clients, `acc_worst10` the mean over the worst tenth of the clients (one at least). Clients
    without samples in this part are left out.
    """
    has = n > 0
    n, correct, loss = n[has], correct[has], loss[has]
    accuracy = correct / n
    worst = np.sort(accuracy)[: max(1, round(0.1 * len(n)))]
    return {
        "acc_uniform": float(accuracy.mean()),
        "acc_pooled": float(correct.sum() / n.sum()),
        "acc_std": float(accuracy.std()),
        "acc_worst10": float(worst.mean()),
        "loss_uniform": float((loss / n).mean()),
    }


def mean_of(entries: list[Metrics]) -> Metrics:
    """Every number averaged over several rounds."""
    return {key: float(np.mean([e[key] for e in entries])) for key in entries[0]}


def in_last_tenth(round_: int, rounds: int) -> bool:
    """Whether a round is in the last tenth of all rounds, the last one at least."""
    return round_ > rounds - max(1, round(0.1 * rounds))


def reaches(entry: Metrics, accuracy: float) -> bool:
    """Whether the mean over clients is `accuracy` or more."""
    # A mean of fractions that is 0.9 on paper may be 0.8999999999999999 in memory.
    return entry["acc_uniform"] >= accuracy - 1e-9


def finite(value: Any) -> Any:
    """The same nest of lists and dicts with None for numbers that JSON cannot say."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
