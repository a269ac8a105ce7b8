"""L2GD's server: in some rounds a coin says that all clients move towards their mean."""

from collections import Counter
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State, Traffic
from ..params import Params
from .average import Average, Weighting


@dataclass(frozen=True)
class Coin(Average):
    """After each round, with probability `chance` a run of averaging steps x <- (1 - c) x + c mean; else nothing.

    A run goes on with the same probability after each of its steps, as the coins of L2GD do between two local steps;
    the mean stays the same, so m steps need one communication and make x <- (1 - c)^m x + (1 - (1 - c)^m) mean.
    Source: L2GD (Hanzely and Richtárik, 2020), Algorithm 1. For clients with `client.Contraction`.
    """

    weighting: Weighting = "uniform"
    chance: float = 0.2
    c: float = 0.5

    def init(self, w0: Params, n_clients: int) -> State:
        """No averaging yet; the coins' seed."""
        return {
            **super().init(w0, n_clients),
            "seed": torch.randint(2**62, ()),
            "number": torch.tensor(0),
            "keep": torch.tensor(1.0, dtype=torch.float64),
        }

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The mean, what clients keep of their own model (1: no averaging), and the number of the coin."""
        payload = super().broadcast(state, ids)
        like = next(iter(payload.params.values()), cast(Tensor, state["keep"])).dtype
        average = {
            k: cast(Tensor, state[k]).to(ids.device, like).expand(len(ids)) for k in ("keep", "number")
        }
        return payload._replace(extra={"average": Params(average)})

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Flip the coin; average if it says so."""
        flipped = self._flipped(state)
        if not _averages(flipped):
            return flipped
        return {**flipped, **super().aggregate(state, ids, sent, received, n)}

    def absorb(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Newcomers are drawn to the mean as it is."""
        return self._flipped(state)

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices | None:
        """The matrix keep I + (1 - keep) 1 p^T over those that were averaged; none in rounds without averaging."""
        p, keep = cast(Tensor, state["p"]), cast(Tensor, state["keep"])
        if not _averages(state):
            return None
        columns = p.index_fill(0, ids, 1.0).nonzero().flatten()
        rows = ((1 - keep.to(p)) * p[columns]).repeat(len(ids), 1)
        own = torch.searchsorted(columns, ids)[:, None]
        return MixingMatrices(ids, columns, {"model": rows.scatter_add(1, own, keep.to(p).expand_as(own))})

    def bytes_down(self, state: State, ids: Tensor, sent: Payload) -> Traffic:
        """Nothing travels without averaging."""
        return sent.traffic() if _averages(state) else Counter()

    def bytes_up(self, state: State, ids: Tensor, received: Payload) -> Traffic:
        """Nothing travels without averaging."""
        return received.traffic() if _averages(state) else Counter()

    def _flipped(self, state: State) -> State:
        number = cast(Tensor, state["number"]) + 1
        rng = np.random.default_rng([int(cast(Tensor, state["seed"])), int(number)])
        steps = int(rng.geometric(1 - self.chance)) - 1  # successes before the first failure
        keep = torch.full_like(cast(Tensor, state["keep"]), (1 - self.c) ** steps)
        return {**state, "number": number, "keep": keep}


def _averages(state: State) -> bool:
    return bool(cast(Tensor, state["keep"]) < 1)
