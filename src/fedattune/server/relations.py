"""MOCHA's server: how the clients' models are related, and what each is drawn to by the others."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from ..core import Payload, State
from ..params import Params
from .bank import Bank
from .products import flat, mix, pieces

SMOOTHING = 1e-4
"""Share of the mean eigenvalue of W^T W that is added to all: its inverse root must exist, as at the start."""


@dataclass(frozen=True)
class Relations(Bank):
    """Sends client t the sum over s != t of Omega_st w_s, and Omega_tt; w_s as last uploaded (at first w^0).

    `mean`: Omega = I - 11^T/m; `learned`: (W^T W)^(-1/2) divided by its trace, made anew from the last uploads.
    Source: MOCHA (Smith et al., 2017), in the form of gradient steps; for clients with `client.Relation`.
    """

    omega: Literal["mean", "learned"] = "mean"

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """What the others' models add up to, for each client."""
        W = cast(Params, state["theta"])
        rows = self.matrix(state)[ids]
        own = rows.gather(1, ids[:, None])
        others = rows.scatter(1, ids[:, None], 0.0)
        related = Params({name: mix(others, W.only([name]).rows(slice(None))[name]) for name in W})
        like = next(iter(related.values()), own)
        return Payload(related, {"omega": Params(own=own[:, 0].to(like.dtype))})

    def matrix(self, state: State) -> Tensor:
        """Omega (N, N)."""
        seen = cast(Tensor, state["seen"])
        m = len(seen)
        identity = torch.eye(m, dtype=torch.float64, device=seen.device)
        if self.omega == "mean":
            return identity - 1 / m
        gram = torch.zeros_like(identity)
        W = cast(Params, state["theta"])
        for name in W:
            models = flat(W.only([name]).rows(slice(None))[name])
            for c in pieces(2 * m, models.shape[1]):
                part = models[:, c].double()
                gram.addmm_(part, part.T)
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0) + SMOOTHING * values.mean().clamp_min(1e-12)
        root = (vectors * values.rsqrt()) @ vectors.T
        omega: Tensor = root / root.trace()
        return omega
