"""MOCHA's server: how the clients' models are related, and what each is drawn to by the others."""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from ..core import Payload, ServerUpdate, State
from ..params import Params

SMOOTHING = 1e-4
"""Share of the mean eigenvalue of W^T W that is added to all: its inverse root must exist, as at the start."""


@dataclass(frozen=True)
class Relations(ServerUpdate):
    """Sends client t the sum over s != t of Omega_st w_s, and Omega_tt; w_s as last uploaded (at first w^0).

    `mean`: Omega = I - 11^T/m; `learned`: (W^T W)^(-1/2) divided by its trace, made anew from the last uploads.
    Source: MOCHA (Smith et al., 2017), in the form of gradient steps; for clients with `client.Relation`.
    """

    per_client: ClassVar[tuple[str, ...]] = ("W", "seen")

    omega: Literal["mean", "learned"] = "mean"

    def init(self, w0: Params, n_clients: int) -> State:
        """W: the initial model N times, and who has uploaded."""
        device = next((v.device for v in w0.values()), torch.device("cpu"))
        return {
            "W": w0.copies(n_clients),
            "seen": torch.zeros(n_clients, dtype=torch.bool, device=device),
        }

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """What the others' models add up to, for each client."""
        W = cast(Params, state["W"])
        rows = self.matrix(state)[ids]
        own = rows.gather(1, ids[:, None])
        others = rows.scatter(1, ids[:, None], 0.0)
        related = W.map(lambda a: torch.tensordot(others.to(a.dtype), a, 1))
        like = next(iter(W.values()), own)
        return Payload(related, {"omega": Params(own=own[:, 0].to(like.dtype))})

    def matrix(self, state: State) -> Tensor:
        """Omega (N, N)."""
        seen = cast(Tensor, state["seen"])
        m = len(seen)
        identity = torch.eye(m, dtype=torch.float64, device=seen.device)
        if self.omega == "mean":
            return identity - 1 / m
        gram = torch.zeros_like(identity)
        for a in cast(Params, state["W"]).values():
            flat = a.reshape(m, -1).double()
            gram = gram + flat @ flat.T
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0) + SMOOTHING * values.mean().clamp_min(1e-12)
        root = (vectors * values.rsqrt()) @ vectors.T
        omega: Tensor = root / root.trace()
        return omega

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep what came back (written in place: it is all that the server holds)."""
        return {
            "W": cast(Params, state["W"]).put_rows(ids, received.params),
            "seen": cast(Tensor, state["seen"]).index_fill(0, ids, True),
        }

    def newcomer(self, state: State) -> Params:
        """The mean of all clients' last uploads."""
        W, seen = cast(Params, state["W"]), cast(Tensor, state["seen"])
        return W.rows(seen.nonzero().flatten() if seen.any() else slice(None)).map(lambda a: a.mean(0))

    def absorb(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep newcomers' uploads too; they are related to all, and nobody else is sent anything any more."""
        return self.aggregate(state, ids, sent, received, n)
