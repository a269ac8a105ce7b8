"""Compute a learning rate with which SGD on a federation cannot diverge, from the curvature of a linear model."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.settings import LossOptions
from ..core.targets import NUMBER_KINDS
from ..data import Federation

MAX_VALUES = 1 << 25
"""Input values that are read; of more, every client is sampled."""
MIN_SAMPLED_ROWS = 32
"""Rows of a client that are read even if there are more than MAX_VALUES in all."""
POWER_STEPS = 20
"""Steps of the power iteration, which finds the largest eigenvalue within a few percent."""
CURVATURES = {"auto": 2.0, "absolute": 2.0, "huber": 1.0}
"""Second derivative by the output of the losses of numbers, at most; squared errors have no factor of half.

Absolute errors have no largest one, and cannot diverge: their gradient has a limit. They take that of squared errors.
"""
CROSS_ENTROPY_CURVATURE = 0.5
"""Second derivative of the cross-entropy by the outputs, at most. Smoothed labels do not change it."""


def find_curvature(options: LossOptions, *, is_for_classes: bool) -> float:
    """Return the largest second derivative of the loss by the outputs; a custom loss is taken for the default.

    That of the focal loss is found on a grid of margins between two classes.
    """
    if not is_for_classes:
        return CURVATURES.get(options.name, CURVATURES["auto"])
    if options.name != "focal":
        return CROSS_ENTROPY_CURVATURE
    margins = np.linspace(-40.0, 40.0, 80_001)
    losses = np.logaddexp(0.0, -margins)
    focal = (-np.expm1(-losses)) ** options.focal_gamma * losses
    # A step of (1, -1) in the outputs has length sqrt(2) and changes the margin by two.
    return float(2 * np.diff(focal, 2).max() / (margins[1] - margins[0]) ** 2)


def compute_safe_rate(federation: Federation, batch_size: int, loss: LossOptions | None = None) -> float:
    """Compute the largest rate at which SGD on a linear model is sure to be stable at every client.

    For batches of m rows it is m / (c (beta + lambda (m - 1))) at the client where it is smallest. Here beta is the
    largest squared norm of an input with its bias, lambda the largest eigenvalue of the second moment of the inputs,
    and c the curvature of the loss. This rate is optimal for squared errors, and half of what would diverge.
    Source: Ma, Bassily and Belkin (ICML 2018), Theorem 1.

    Args:
        federation: the clients' data. Of very large data, a part of each client's rows is read.
        batch_size: rows in a mini-batch; a client with fewer takes all of them.
        loss: the options of the training loss; None for the defaults. With class weights, m is 1: one row may make up
            its batch.

    Returns:
        The rate; infinite without training rows. Networks with hidden layers can need a smaller one, and networks with
        convolutions or normalization take a larger one.
    """
    loss = loss or LossOptions()
    rows = federation.part("train")
    sizes = rows.sizes
    n_inputs = math.prod(federation.input_shape)
    kept = np.minimum(sizes, max(MIN_SAMPLED_ROWS, MAX_VALUES // max(1, len(sizes) * n_inputs)))
    starts = np.concatenate([[0], kept.cumsum()])
    # Rows at equal distances: those of a table may be sorted.
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], kept)
    index = rows.flat[np.repeat(rows.bounds[:-1], kept) + within * np.repeat(sizes, kept) // np.repeat(kept, kept)]
    squares = np.empty(len(index))
    chunk = max(1, MAX_VALUES // max(1, 4 * n_inputs))
    for at in range(0, len(index), chunk):
        squares[at : at + chunk] = (_read_inputs(federation, index[at : at + chunk]) ** 2).sum(axis=1)

    has = np.flatnonzero(kept)
    beta = np.maximum.reduceat(squares, starts[has]) if len(has) else np.empty(0)
    trace = np.add.reduceat(squares, starts[has]) / kept[has] if len(has) else np.empty(0)
    # The loss of labels is flatter than this bound, which keeps networks stable whose layers all labels share.
    curvature = find_curvature(loss, is_for_classes=federation.kind not in NUMBER_KINDS)
    m = np.minimum(sizes[has], 1 if loss.class_weights else batch_size)
    # The trace bounds the eigenvalue: clients whose bound is above a rate found before need no eigenvalue.
    bounds = m / (curvature * (beta + trace * (m - 1)))
    rate = math.inf
    for i in np.argsort(bounds):
        if bounds[i] >= rate:
            break
        x = _read_inputs(federation, index[starts[has[i]] : starts[has[i] + 1]])
        largest = _find_largest_eigenvalue(x) if m[i] > 1 else 0.0
        rate = min(rate, float(m[i] / (curvature * (beta[i] + largest * (m[i] - 1)))))
    return rate


def _read_inputs(federation: Federation, index: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return inputs with a bias (n, inputs + 1)."""
    samples = torch.as_tensor(index.astype(np.int64), device=federation.y.device)
    x = federation.features(samples).float().flatten(1).cpu().numpy()
    return np.concatenate([x, np.ones((len(x), 1), dtype=np.float32)], axis=1)


def _find_largest_eigenvalue(x: NDArray[np.float32]) -> float:
    """Return the largest eigenvalue of the second moment of rows (n, d), by power iteration from the largest row."""
    v = x[(x**2).sum(axis=1).argmax()].astype(np.float64)
    value = 0.0
    for _ in range(POWER_STEPS):
        v /= max(float(np.linalg.norm(v)), np.finfo(np.float64).tiny)
        v = x.T @ (x @ v) / len(x)
        value = float(np.linalg.norm(v))
    return value
