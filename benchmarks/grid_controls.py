"""Controls of the grid: what plain methods reach with more epochs, with their validation rows, or mixed afterwards.

A method that does more than `local` and `fedavg` should be better than these.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from fedattune.data import Federation
from fedattune.runs.predictions import RowPredictions

from .grid_cells import Cell
from .grid_measures import Measures, fit_cell, measure_clients, measure_result, measure_validation

Values = NDArray[np.float64]
Parts = Mapping[str, RowPredictions]

SHARES = (0.0, 0.5, 1.0)
"""Shares of the shared model in the experts of a mixture, and of the class shares that correct it."""
EXPERTS = [(s, c) for s in SHARES for c in (SHARES if s else SHARES[:1])]
"""Share of the shared model and strength of its correction by the client's class shares, of each expert for classes."""
MIN_PROBABILITY = 1e-4
"""Smaller probabilities count as this one in the losses of experts."""
PRIOR_ROWS = 20
"""Rows of the client's own that the mean loss over all clients counts as."""


def train_twice(method: str, cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train a method with twice the epochs per round."""
    return measure_result(data, fit_cell(cell, data, method, lr, seed, epochs=2 * cell.settings["epochs"]))


def train_on_all(method: str, cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train a method on training and validation rows; its validation scores are of training without the latter."""
    plain = measure_result(data, fit_cell(cell, data, method, lr, seed))
    whole = join_validation(data)
    result = fit_cell(cell, whole, method, lr, seed, early_stopping="off")
    return plain | measure_clients(whole, result.predictions["test"])


def join_validation(data: Federation) -> Federation:
    """Return the federation with its validation rows among the training rows."""
    clients = [
        replace(client, train=np.concatenate([client.train, client.validation]), validation=client.validation[:0])
        for client in data.clients
    ]
    return replace(data, clients=clients)


def train_mixture(method: str, cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train `local` and a shared method, and mix the predictions of both."""
    own, shared = (fit_cell(cell, data, name, lr, seed).predictions for name in ("local", method))
    mixed = mix_parts(own, shared, find_class_shares(data))
    return measure_clients(data, mixed["test"]) | measure_validation(data, mixed["validation"])


def find_class_shares(data: Federation) -> Values:
    """Find the shares of the classes in each client's training rows (N, classes), with half a row more of each."""
    counts = data.label_counts("train") + 0.5
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def mix_parts(own: Parts, shared: Parts, class_shares: Values) -> Parts:
    """Mix the predictions of two runs by weights that each client finds on its validation rows."""
    experts = {part: predict_experts(own[part], shared[part], class_shares) for part in ("validation", "test")}
    weights = weigh_experts(experts["validation"], own["validation"])
    return {part: _mix(own[part], each, weights) for part, each in experts.items()}


def predict_experts(own: RowPredictions, shared: RowPredictions, class_shares: Values) -> Values:
    """Let the experts predict rows: probabilities (experts, n, classes), or numbers (experts, n, 1)."""
    assert np.array_equal(own.sample, shared.sample)
    alone, together = (one.outputs.astype(np.float64) for one in (own, shared))
    if own.is_regression:
        alone, together = (np.nan_to_num(one, nan=1e30, posinf=1e30, neginf=-1e30) for one in (alone, together))
        return np.stack([(1 - s) * alone + s * together for s in SHARES])
    shift = np.log(class_shares)[own.client]
    experts = [s * softmax(together + c * shift, axis=1) + (1 - s) * softmax(alone, axis=1) for s, c in EXPERTS]
    return np.asarray(np.nan_to_num(np.stack(experts)))  # of a model that diverged


def weigh_experts(experts: Values, rows: RowPredictions) -> Values:
    """Weigh the experts by the losses on each client's rows (experts, N), and on all clients' rows as a prior."""
    if rows.is_regression:
        errors = (experts[..., 0] - rows.y) ** 2
        losses = errors / max(2 * errors.mean(axis=1).min(), 1e-30)
    else:
        losses = -np.log(np.maximum(experts[:, np.arange(len(rows.y)), rows.y], MIN_PROBABILITY))
    sums = np.stack([np.bincount(rows.client, one, rows.n_clients) for one in losses])
    return np.asarray(softmax(-sums - PRIOR_ROWS * losses.mean(axis=1, keepdims=True), axis=0))


def _mix(rows: RowPredictions, experts: Values, weights: Values) -> RowPredictions:
    mixed = np.einsum("en,enk->nk", weights[:, rows.client], experts)
    outputs = mixed if rows.is_regression else np.log(np.maximum(mixed, 1e-30))
    return replace(rows, outputs=outputs.astype(np.float32))


CONTROLS: dict[str, Callable[[Cell, Federation, float, int], Measures]] = {
    **{f"{name}_2x": partial(train_twice, name) for name in ("local", "fedavg_ft", "fedavgm")},
    **{f"{name}_all": partial(train_on_all, name) for name in ("local", "fedavgm")},
    **{f"local+{name}": partial(train_mixture, name) for name in ("fedavg", "fedavgm", "fedavg_ft")},
}
"""Name -> training of a control on a federation of a cell, by learning rate and seed."""
