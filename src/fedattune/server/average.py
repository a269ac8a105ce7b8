"""Average the cohort's uploads into one global model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from ..core.algorithm import Joinable, PerClient, ServerTraits, ServerUpdate, SumsOnly, SumWeighting, change
from ..core.params import Params
from ..core.payload import Broadcast, MixingMatrices, Payload

Weighting = Literal["samples", "uniform"]


def client_weights(n: Tensor, weighting: Weighting) -> Tensor:
    """Return weights (C,) that sum to 1: proportional to the sample counts `n` (C,), or uniform."""
    p = torch.ones_like(n, dtype=torch.float64) if weighting == "uniform" else n.double()
    return p / p.sum()


def weighted_sum(p: Tensor, stack: Params) -> Params:
    """Return sum_k p_k theta_k over a stack of C models; `p` (C,)."""
    return stack.map(lambda a: torch.tensordot(p.to(a.dtype), a, 1))


def mean_update(p: Tensor, sent: Params, uploads: Params) -> Params:
    """Return sum_k p_k (upload_k - sent_k) over C models, one tensor at a time; `p` (C,)."""
    return uploads.map(lambda a, b: torch.tensordot(p.to(a.dtype), a - b, 1), sent)


def store_weights(old: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """Write the weights of all clients `old` (N,) in place: `p` (C,) for clients `ids`, 0 for all others."""
    return old.to(p).zero_().index_copy_(0, ids, p)


class AverageState(TypedDict):
    """The global model, and the weights (N,) of the last cohort."""

    w: Params
    p: PerClient[Tensor]


AverageT = TypeVar("AverageT", bound=AverageState)


@dataclass(frozen=True)
class Average(ServerUpdate[AverageT], SumsOnly):
    """w <- (1 - beta) w + beta sum_k p_k theta_k over the cohort, p_k = n_k / sum_j n_j, or 1/C if uniform."""

    weighting: Weighting = "samples"
    beta: float = 1.0

    traits = ServerTraits(AverageState)

    def init(self, w0: Params, n_clients: int) -> AverageT:
        return cast(AverageT, {"w": w0, "p": torch.zeros(n_clients, dtype=torch.float64)})

    def broadcast(self, state: AverageT, ids: Tensor) -> Broadcast:
        w, p = state["w"], state["p"]
        columns = p.nonzero().flatten()
        mixing = None
        if len(columns) and w:
            mixing = MixingMatrices(ids, columns, {"model": p[columns].expand(len(ids), -1)})
        return Broadcast(Payload(w.repeat(len(ids))), mixing)

    def aggregate(self, state: AverageT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> AverageT:
        w = state["w"]
        p = client_weights(n, self.weighting)
        mean = weighted_sum(p, uploads.params)
        new = mean if self.beta == 1 else (1 - self.beta) * w + self.beta * mean
        return change(state, w=new, p=store_weights(state["p"], ids, p))

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting]:
        return {"params": self.weighting}


@dataclass(frozen=True)
class PartAverage(Average[AverageState], Joinable[AverageState]):
    """FedAvg for networks with personal parts; a newcomer's personal parts start as copies of shared parts.

    `copies` has pairs of names: a personal part, and the shared part to copy.
    """

    copies: tuple[tuple[str, str], ...] = ()

    def newcomer_model(self, state: AverageState) -> Params:
        w = state["w"]
        more = {
            own + name.removeprefix(shared): value
            for own, shared in self.copies
            for name, value in w.items()
            if name.startswith(shared + ".")
        }
        return Params({**w, **more})
