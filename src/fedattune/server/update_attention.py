"""One global model, moved by the cohort's updates, weighted by attention among them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State
from ..params import Params
from .average import Average, Weighting, shares, weighted_sum

Query = Literal["self", "global", "time"]
TimeForm = Literal["T1", "T2", "T3"]


@dataclass(frozen=True)
class UpdateAttention(Average):
    """w <- w + beta sum_j b_j Delta_j, Delta_j = received_j - sent_j; b_j = sum_i p_i A[i, j].

    A[i, :] = softmax_j of (log p_j + <q_i, Delta_j>), p_i = 1 / |S| (or by samples), plain dot products over the whole
    model in float64. Source: IGFL (Huang et al., 2021), equation 11 and Algorithm 3, where p is uniform and cancels.

    Attributes:
        query: `self`: q_i = Delta_i; `global`: q_i = sum_j p_j Delta_j; `time`: the update before, Delta'_i, which the
            server keeps for every client and which is zero before its first.
        form: of `time`, which the paper writes in three ways. `T1`: q_i = Delta'_i as in Algorithm 3; `T2`: its
            displayed formula, b_j = A[j, j] of T1, which does not sum to 1; `T3`: the displayed score, normalised:
            b_j = softmax_j of (log p_j + <Delta'_j, Delta_j>).

    """

    per_client: ClassVar[tuple[str, ...]] = ("p", "delta")

    weighting: Weighting = "uniform"
    query: Query = "self"
    form: TimeForm = "T3"

    def init(self, w0: Params, n_clients: int) -> State:
        """The initial model, the weights b (N,) of the last cohort, and each client's last update for `time`."""
        last: State = {"delta": w0.zeros().copies(n_clients)} if self.query == "time" else {}
        return {**super().init(w0, n_clients), **last}

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Move the global model; the last updates are written in place, they are the server's alone."""
        w = cast(Params, state["w"])
        delta = received.params - sent.params
        before = cast(Params, state["delta"]).rows(ids) if self.query == "time" else delta
        b = self.weights(delta, before, shares(n, self.weighting))
        last: State = (
            {"delta": cast(Params, state["delta"]).put_rows(ids, delta)} if self.query == "time" else {}
        )
        return {
            "w": w + self.beta * weighted_sum(b, delta),
            "p": torch.zeros(len(state["p"]), dtype=b.dtype, device=b.device).index_copy_(0, ids, b),
            **last,
        }

    def weights(self, delta: Params, before: Params, p: Tensor) -> Tensor:
        """The weights b (C,) of the updates `delta`, from the clients' updates before and their shares p (C,)."""
        if not delta:  # nothing is shared
            return p
        if self.query == "time" and self.form == "T3":
            return torch.softmax(p.log() + _dots(before, delta, "cp,cp->c"), 0)
        if self.query == "global":
            return torch.softmax(p.log() + _dots(weighted_sum(p, delta), delta, "p,cp->c"), 0)
        attention = torch.softmax(p.log() + _dots(before, delta, "ip,jp->ij"), 1)
        if self.query == "time" and self.form == "T2":
            return attention.diagonal()
        return p @ attention

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices | None:
        """One matrix whose rows all are b; none where the weights do not sum to 1."""
        return None if self.query == "time" and self.form == "T2" else super().mixing(state, ids)


def _dots(a: Params, b: Params, how: str) -> Tensor:
    """Dot products over all tensors in float64, as the einsum `how` says for one flattened tensor of each."""
    rows = how.index(",") - 1
    products = [torch.einsum(how, _flat(a[k], rows), _flat(b[k], 1)) for k in b]
    return torch.stack(products).sum(0)


def _flat(tensor: Tensor, leading: int) -> Tensor:
    """(P,) or (C, P): all axes behind the first `leading` as one, in float64."""
    return tensor.double().reshape(*tensor.shape[:leading], -1)
