"""What is stored of a run on the grid: validation scores, and each client's accuracy with its standard error.

Of a target that is a number, accuracy is the share of its variance over all clients that a model explains, at least 0.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import log_softmax

import fedattune
from fedattune.core.algorithm import Algorithm
from fedattune.data import Federation
from fedattune.runs.predictions import RowPredictions

from .grid_cells import Cell

Measures = dict[str, Any]
"""The columns of a stored run that training decides; see `grid.SCHEMA`."""


def fit_cell(
    cell: Cell,
    data: Federation,
    algorithm: Algorithm | str,
    lr: float,
    seed: int,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> fedattune.Result:
    """Train a method on a cell; `more` are settings in place of the cell's."""
    return fedattune.fit(
        data,
        algorithm,
        cell.model,
        options=options,
        model_options=cell.model_options,
        lr=lr,
        seed=seed,
        **{**cell.settings, **more},
    )


def measure_result(data: Federation, result: fedattune.Result) -> Measures:
    """Measure the judged models of a run."""
    measures = measure_clients(data, result.predictions["test"])
    if result.is_regression:
        return measures | measure_validation(data, result.predictions["validation"])
    n, right, loss = np.nansum(result.judged_scores("validation"), axis=1)
    return measures | {"validation_accuracy": float(right / n), "validation_loss": float(loss / n)}


def measure_validation(data: Federation, rows: RowPredictions) -> Measures:
    """Measure all validation rows together."""
    if rows.is_regression:
        loss = float(square_errors(rows).mean())
        return {"validation_accuracy": max(0.0, 1 - loss / _find_variance(data)), "validation_loss": loss}
    losses = -log_softmax(rows.outputs.astype(np.float64), axis=1)[np.arange(len(rows.y)), rows.y]
    return {"validation_accuracy": rows.pooled["accuracy"], "validation_loss": float(losses.mean())}


def measure_clients(data: Federation, rows: RowPredictions) -> Measures:
    """Measure each client's test rows; all clients of the federation are evaluated."""
    if rows.is_regression:
        errors = square_errors(rows) / _find_variance(data)
        each = [errors[rows.rows(i)] for i in range(rows.n_clients)]
        accuracies = np.array([max(0.0, 1 - mine.mean()) for mine in each])
        with np.errstate(invalid="ignore"):  # infinite errors of a model that diverged
            deviations = np.array([mine.std(ddof=1) / np.sqrt(len(mine)) if len(mine) > 1 else np.nan for mine in each])
    else:
        accuracies, n = rows.measure_clients("accuracy"), rows.sizes
        drawn = (n * accuracies + 1) / (n + 2)  # no client is surely right of all rows, or of none
        deviations = np.sqrt(drawn * (1 - drawn) / n)
    return {
        "accuracy": float(np.nanmean(accuracies)),
        "accuracies": [_round(value) for value in accuracies],
        "deviations": [_round(value) for value in deviations],
        "clients": list(data.names),
    }


def square_errors(rows: RowPredictions) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the squared error of each predicted number (n,)."""
    return np.asarray((rows.outputs[:, 0].astype(np.float64) - rows.y) ** 2)


def _find_variance(data: Federation) -> float:
    """Return the variance of all clients' training targets, in the unit of the target."""
    assert data.target_scale is not None
    return data.target_scale.deviation**2


def _round(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None
