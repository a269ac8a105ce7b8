"""Trials of the grid: methods of papers with one change each, to find out what would make them pay.

Their names are `METHOD@CHANGE`. No trial counts as the best method of a cell.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.own import build_method
from fedattune.core.algorithm import Algorithm
from fedattune.data import Federation
from fedattune.server.mixing import Pool
from fedattune.server.products import softmax_

from .grid_cells import Cell
from .grid_measures import Measures, fit_cell, measure_result


def judge_at(point: Literal["received", "trained"], method: str) -> Algorithm:
    """Make a method whose clients are judged at another point: by the received model, or after local training."""
    return replace(build_method(method, {}), evaluation_point=point)


@dataclass(frozen=True)
class UpdateAttention(Attention):
    """FedMCSA's attention by cosines of the models' differences from their mean, in place of the models."""

    def weights(self, pool: Pool) -> Tensor:
        models = torch.cat([part() for part in pool.parts], 1)
        updates = torch.nn.functional.normalize(models - models[pool.member].mean(0))
        scores = (updates[pool.own] @ updates.T).nan_to_num_(0, 0, 0).scatter_(1, pool.own[:, None], 1.0)
        if self.size_weighted:
            scores += pool.n.to(scores.dtype).log() / self.sigma
        return softmax_(scores.mul_(self.sigma).masked_fill_(~pool.allowed, -torch.inf))


def attend_to_updates(sigma: float) -> Algorithm:
    """Make FedMCSA with attention to updates, judged by the received models."""
    method = build_method("fedmcsa", {})
    attention = method.server
    assert isinstance(attention, Attention)
    server = UpdateAttention(attention.unit, sigma=sigma, size_weighted=attention.size_weighted)
    return replace(method, server=server, evaluation_point="received")


def train_trial(make: Callable[[], Algorithm], cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train a changed method."""
    return measure_result(data, fit_cell(cell, data, make(), lr, seed))


CHANGED: dict[str, Callable[[], Algorithm]] = {
    "fedmcsa@received": partial(judge_at, "received", "fedmcsa"),
    "fedmcsa@updates": partial(attend_to_updates, 5.0),
    **{f"{name}@trained": partial(judge_at, "trained", name) for name in ("pfedla", "igfl", "fedam")},
}

TRIALS: dict[str, Callable[[Cell, Federation, float, int], Measures]] = {
    name: partial(train_trial, make) for name, make in CHANGED.items()
}
"""Name -> training of a trial on a federation of a cell, by learning rate and seed."""
