"""Summaries of the scores of clients, and the history of a run made of them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import MetricName
from .storage.store import RunStore

Metrics = dict[str, float]
"""acc_uniform, acc_pooled, acc_std, acc_worst10, loss_uniform; accuracies are fractions.

If the target is a number: rmse_uniform, rmse_pooled, rmse_std and rmse_worst10 in its unit, and loss_uniform.
"""

JsonDict = dict[str, Any]

MERGED_NAME = "all clients together"
"""Name of the client that stands for all where the server learns sums only (secure aggregation)."""


def score_clients(
    n: NDArray[np.int64],
    correct: NDArray[np.int64],
    loss: NDArray[np.float64],
    *,
    deviation: float | None = None,
) -> NDArray[np.float64]:
    """Compute what curves show of each client (N,): its accuracy, or its RMSE in the unit of the target.

    Args:
        n: (N,) samples of each client, at least one.
        correct: (N,) samples that were classified rightly.
        loss: (N,) sum of the losses; of squared errors in deviations of the target if it is a number.
        deviation: the deviation of a target that is a number; None for classes.

    """
    return correct / n if deviation is None else deviation * np.sqrt(loss / n)


def measure_scores(
    metric: MetricName, scores: NDArray[np.float64], deviation: float | None
) -> NDArray[np.float64]:
    """Compute a metric of each client (N,) from its scores; NaN for metrics that need more than scores.

    Args:
        metric: accuracy, log_loss or rmse.
        scores: samples, right predictions and sums of losses, (3, N).
        deviation: the deviation of a target that is a number; None for classes.

    """
    n, correct, loss = scores
    values: NDArray[np.float64] = np.full(len(n), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        if metric == "accuracy" and deviation is None:
            values = correct / n
        elif metric == "log_loss" and deviation is None:
            values = loss / n
        elif metric == "rmse" and deviation is not None:
            values = deviation * np.sqrt(loss / n)
    return values


def summarize_scores(
    n: NDArray[np.int64],
    correct: NDArray[np.int64],
    loss: NDArray[np.float64],
    *,
    deviation: float | None = None,
) -> Metrics:
    """Summarise the scores of clients; clients without samples are left out.

    Args:
        n: (N,) samples of each client.
        correct: (N,) samples that were classified rightly.
        loss: (N,) sum of the losses.
        deviation: the deviation of a target that is a number; None for classes.

    Returns:
        `acc_uniform` weighs every client alike, `acc_pooled` every sample. `acc_std` is the population standard
        deviation over clients, `acc_worst10` the mean over the worst tenth of the clients (at least one).
        With a deviation, the same of the RMSE: `rmse_uniform` and so on.

    """
    has = n > 0
    n, correct, loss = n[has], correct[has], loss[has]
    values = score_clients(n, correct, loss, deviation=deviation)
    name, best_last = ("acc", 1) if deviation is None else ("rmse", -1)
    worst = np.sort(values)[::best_last][: max(1, round(0.1 * len(n)))]
    pooled = score_clients(n.sum(), correct.sum(), loss.sum(), deviation=deviation)
    with np.errstate(invalid="ignore"):  # the spread of infinite errors is not a number
        spread = float(values.std())
    return {
        f"{name}_uniform": float(values.mean()),
        f"{name}_pooled": float(pooled),
        f"{name}_std": spread,
        f"{name}_worst10": float(worst.mean()),
        "loss_uniform": float((loss / n).mean()),
    }


def average_metrics(entries: list[Metrics]) -> Metrics:
    """Average every number over several rounds."""
    return {key: float(np.mean([e[key] for e in entries])) for key in entries[0]}


def is_in_last_tenth(round_: int, rounds: int) -> bool:
    """Return whether a round is in the last tenth of all rounds, which has at least one round."""
    return round_ > rounds - max(1, round(0.1 * rounds))


def reaches(entry: Metrics, accuracy: float) -> bool:
    """Return whether the mean over clients is at least `accuracy`."""
    # A mean of fractions that is 0.9 on paper may be 0.8999999999999999 in memory.
    return entry["acc_uniform"] >= accuracy - 1e-9


def replace_nonfinite(value: Any) -> Any:
    """Copy a nest of lists and dicts, with None for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {k: replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_history(
    store: RunStore, names: Mapping[int, str], deviation: float | None = None
) -> list[JsonDict]:
    """List the evaluated rounds: metrics at both points on both parts, traffic and time so far, and missing clients.

    `diverged` and `absent` name clients since the evaluation before. Methods with one global model also have `global`.

    Args:
        store: the rounds of the run.
        names: names of the clients by number.
        deviation: the deviation of a target that is a number; None for classes.

    """
    points: dict[tuple[int, str], dict[str, Metrics]] = {}
    for part in ("test", "validation"):
        for round_, point, (n, correct, loss) in store.scores(part):
            metrics = points.setdefault((round_, part), {})
            metrics[point] = summarize_scores(n, correct, loss, deviation=deviation)
    entries: list[JsonDict] = []
    diverged: set[int] = set()
    absent: set[int] = set()
    for record in store.rounds():
        diverged |= set(record.diverged)
        absent |= set(record.absent)
        if (test := points.get((record.round, "test"))) is not None:
            entry = {
                "round": record.round,
                "received": test.get("received"),
                "trained": test.get("trained"),
                "validation": points.get((record.round, "validation")),
                "bytes": {"up": record.bytes_up, "down": record.bytes_down},
                "seconds": record.seconds,
                "diverged": [names[i] for i in sorted(diverged)],
                "absent": [names[i] for i in sorted(absent)],
            }
            entries.append(entry | ({"global": test["global"]} if "global" in test else {}))
            diverged, absent = set(), set()
    return entries
