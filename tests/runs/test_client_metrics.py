"""All clients measured at once: equal, bit by bit, to each client measured alone."""

import numpy as np
import pytest

from fedattune.core.metrics import METRICS, compute_metrics, list_metrics
from fedattune.runs.client_metrics import CLIENT_MEASURES
from fedattune.runs.predictions import RowPredictions

SIZES = [7, 0, 1, 40, 3, 0, 12, 25]
"""Rows of each client; two have none, one of them between others."""


def predict(n_classes: int, *, diverged: int | None = None) -> RowPredictions:
    """Predictions of clients of many sizes, with ties among scores; client 3 has one class; 0 classes: numbers."""
    random = np.random.default_rng(n_classes)
    client = np.repeat(np.arange(len(SIZES)), SIZES).astype(np.int32)
    outputs = random.integers(-3, 4, (len(client), max(1, n_classes))).astype(np.float32) / 2
    y = random.integers(0, n_classes, len(client)) if n_classes else random.normal(size=len(client))
    if n_classes:
        y[client == 3] = 1
    if diverged is not None:
        outputs[np.flatnonzero(client == diverged)[0]] = np.inf
    return RowPredictions(client, np.arange(len(client)), y, outputs, len(SIZES))


@pytest.mark.parametrize("diverged", [None, 0])
@pytest.mark.parametrize("n_classes", [0, 2, 3, 12])
def test_all_clients_at_once_have_the_values_of_each_client_alone(n_classes: int, diverged: int | None) -> None:
    found = predict(n_classes, diverged=diverged)
    names = list_metrics("class" if n_classes else "number")
    assert len(CLIENT_MEASURES.keys() & set(names)) >= 2
    for name in names:
        alone = [
            compute_metrics(found.y[rows], found.outputs[rows], [name])[name]
            for rows in map(found.rows, range(len(SIZES)))
        ]
        np.testing.assert_array_equal(found.measure_clients(name), alone, err_msg=name)


def test_clients_without_any_rows_have_no_values() -> None:
    none = RowPredictions(
        np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.float32), 2
    )
    for name in CLIENT_MEASURES:
        if METRICS[name].is_for_classes:
            assert np.isnan(none.measure_clients(name)).all(), name
