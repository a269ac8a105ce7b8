"""One global model, moved by the cohort's updates, weighted by attention among them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State
from ..params import Params, as_slice
from .average import Average, Weighting, change, last_weights, shares
from .products import flat, pieces

Query = Literal["self", "global", "time"]
TimeForm = Literal["T1", "T2", "T3"]


MOST_SHOWN = 1_000
"""Clients of whom the attention matrix is kept, for people to look at."""


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
        if not self._single and n_clients <= MOST_SHOWN:
            last["attention"] = torch.zeros(n_clients, n_clients, dtype=torch.float64)
        return {**super().init(w0, n_clients), **last}

    @property
    def _single(self) -> bool:
        """Whether every update has one score, instead of one for each client that asks."""
        return self.query == "global" or (self.query == "time" and self.form == "T3")

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Move the global model; the last updates are written in place, they are the server's alone."""
        b = self.weights(state, ids, sent.params, received.params, shares(n, self.weighting))
        new: State = {
            "w": cast(Params, state["w"]) + self.beta * change(b, sent.params, received.params),
            "p": last_weights(state, ids, b),
        }
        if self.query == "time":
            last = cast(Params, state["delta"])
            for name, after in received.params.items():
                last.only([name]).put_rows(ids, Params({name: after - sent.params[name]}))
            new["delta"] = last
        if "attention" in state:
            new["attention"] = cast(Tensor, state["attention"])
        return new

    def weights(self, state: State, ids: Tensor, sent: Params, received: Params, p: Tensor) -> Tensor:
        """The weights b (C,) of the cohort's updates, from what it was `sent` and `received`, and its shares p (C,)."""
        if not received:  # nothing is shared
            return p
        scores = self._scores(state, ids, sent, received, p)
        if scores.dim() == 1:
            return torch.softmax(p.log() + scores, 0)
        attention = torch.softmax(p.log() + scores, 1)
        if "attention" in state:
            cast(Tensor, state["attention"]).zero_()[ids[:, None], ids] = attention
        if self.query == "time" and self.form == "T2":
            return attention.diagonal()
        return p @ attention

    def _scores(self, state: State, ids: Tensor, sent: Params, received: Params, p: Tensor) -> Tensor:
        """<q_i, Delta_j> (C, C) in float64; (C,) where only <q_j, Delta_j> counts, or all have the same q."""
        out = p.new_zeros((len(p),) if self._single else (len(p), len(p)))
        for name, tensor in received.items():
            after, before = flat(tensor), flat(sent[name])
            if self.query == "time":
                last = flat(cast(Params, state["delta"]).only([name]).rows(as_slice(ids))[name])
            for c in pieces(2 * len(p), after.shape[1]):
                delta = (after[:, c] - before[:, c]).double()
                query = last[:, c].double() if self.query == "time" else delta
                if self.query == "global":
                    out += delta @ (p @ delta)
                elif self._single:
                    out += (query * delta).sum(1)
                else:
                    out.addmm_(query, delta.T)
        return out

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices | None:
        """One matrix whose rows all are b, none where the weights do not sum to 1; and A where there is one."""
        found = None if self.query == "time" and self.form == "T2" else super().mixing(state, ids)
        if "attention" not in state or not (attention := cast(Tensor, state["attention"])).any():
            return found
        who = attention.any(1).nonzero().flatten()
        weights = {"model": cast(Tensor, state["p"])[who].repeat(len(ids), 1)} if found else {}
        return MixingMatrices(ids, who, {**weights, "attention": attention[ids][:, who]})
