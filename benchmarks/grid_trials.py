"""Trials of the grid: methods of papers with a change, to find out what would make them pay.

Their names are `METHOD@CHANGE`. No trial counts as the best method of a cell. All changes of FedMCSA's attention come
on top of `fedmcsa@received`, with a sigma that fits the cosines.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.own import build_method
from fedattune.algorithms.pfedgraph import CollaborationGraph
from fedattune.core.algorithm import Algorithm, ServerTraits
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.core.selectors import group_names
from fedattune.data import Federation
from fedattune.server.mixing import Pool, StoreState
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


@dataclass(frozen=True)
class StartAttention(CollaborationGraph):
    """FedMCSA's attention by cosines of the models' differences from the initial model, as pFedGraph compares them."""

    sigma: float = 10.0
    size_weighted: bool = True

    def weights(self, pool: Pool) -> Tensor:
        return Attention(self.unit, sigma=self.sigma, size_weighted=self.size_weighted).weights(pool)


@dataclass(frozen=True)
class HalfOwnAttention(Attention):
    """FedMCSA's attention to the other clients, with half of the weight on the client's own component."""

    def weights(self, pool: Pool) -> Tensor:
        own = torch.zeros_like(pool.allowed).scatter_(1, pool.own[:, None], True)
        others = pool.allowed & ~own
        has_other = others.any(1, keepdim=True)
        found = super().weights(replace(pool, allowed=torch.where(has_other, others, pool.allowed)))
        return torch.where(has_other, (found + own) / 2, found)


class CountedState(StoreState):
    """A store that counts its rounds."""

    rounds: Tensor


@dataclass(frozen=True)
class StagedPool(Pool):
    """A pool whose components are averaged: all but those of the `head`, in an early round."""

    is_early: bool
    head: frozenset[str]


@dataclass(frozen=True)
class LateAttention(Attention):
    """FedMCSA's attention, with averages of all tensors but the last layer's in the first `early` rounds."""

    early: int = 25

    traits = ServerTraits(CountedState)

    def init(self, w0: Params, n_clients: int) -> StoreState:
        return cast(StoreState, {**super().init(w0, n_clients), "rounds": torch.tensor(0)})

    def aggregate(self, state: StoreState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StoreState:
        rounds = cast(CountedState, state)["rounds"] + 1
        return cast(StoreState, {**super().aggregate(state, ids, sent, uploads, n), "rounds": rounds})

    def pool_for(self, state: StoreState, ids: Tensor, members: Tensor) -> Pool:
        *_, (_, head) = group_names(state["theta"], "layer").items()
        is_early = int(cast(CountedState, state)["rounds"]) < self.early
        return StagedPool(**vars(super().pool_for(state, ids, members)), is_early=is_early, head=frozenset(head))

    def weights(self, pool: Pool) -> Tensor:
        assert isinstance(pool, StagedPool)
        if pool.is_early and not pool.head & set(pool.models):
            return Attention(self.unit, sigma=0.0, size_weighted=self.size_weighted).weights(pool)
        return super().weights(pool)


def attend(kind: type[Attention | StartAttention], **options: float) -> Algorithm:
    """Make FedMCSA with another attention, judged by the received models."""
    method = judge_at("received", "fedmcsa")
    attention = method.server
    assert isinstance(attention, Attention)
    return replace(method, server=kind(**{**vars(attention), **options}))


def train_trial(make: Callable[[], Algorithm], cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train a changed method."""
    return measure_result(data, fit_cell(cell, data, make(), lr, seed))


def train_best_sigma(cell: Cell, data: Federation, lr: float, seed: int) -> Measures:
    """Train FedMCSA with several sigma, judged by the received models, and keep the one of the best validation."""
    found = [
        train_trial(partial(attend, Attention, sigma=sigma), cell, data, lr, seed) for sigma in (5.0, 20.0, 50.0, 200.0)
    ]
    return max(found, key=lambda one: (np.nan_to_num(one["validation_accuracy"]), -one["validation_loss"]))


CHANGED: dict[str, Callable[[], Algorithm]] = {
    "fedmcsa@received": partial(judge_at, "received", "fedmcsa"),
    "fedmcsa@updates": partial(attend, UpdateAttention, sigma=5.0),
    "fedmcsa@start": partial(attend, StartAttention, sigma=10.0),
    "fedmcsa@half_own": partial(attend, HalfOwnAttention),
    "fedmcsa@late": partial(attend, LateAttention),
    "pfedla@fast": partial(build_method, "pfedla", {"hn_lr": 0.02}),
    **{f"{name}@trained": partial(judge_at, "trained", name) for name in ("pfedla", "igfl", "fedam")},
}

TRIALS: dict[str, Callable[[Cell, Federation, float, int], Measures]] = {
    **{name: partial(train_trial, make) for name, make in CHANGED.items()},
    "fedmcsa@best_sigma": train_best_sigma,
}
"""Name -> training of a trial on a federation of a cell, by learning rate and seed."""
