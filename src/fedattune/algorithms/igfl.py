"""IGFL, IGFL-C and IGFL-S.

    @inproceedings{huang2021behavior,
      author = {Huang, Hua and Shang, Fanhua and Liu, Yuanyuan and Liu, Hongying},
      title = {Behavior Mimics Distribution: Combining Individual and Group Behaviors for Federated Learning},
      booktitle = {International Joint Conference on Artificial Intelligence (IJCAI)},
      year = {2021},
      eprint = {2106.12300},
      archiveprefix = {arXiv}
    }

Rules:

    client  (IGFL-C, Algorithm 2)   w <- w + dI + dG,   dI = -lr g(w; B),
            dG = (dI - Delta_i / T) / |S| + D / T,   D = w^r - w^(r-1), Delta_i the own last update, T local steps
    server  (IGFL-S, Algorithm 3)   w <- w + (1 / |S|) sum_i sum_j A[i, j] Delta_j,
            A[i, :] = softmax_j <q_i, Delta_j>                                                         (11)
            q_i = Delta_i (self), mean_j Delta_j (global), or the update before, Delta'_i (time)

IGFL has both parts. IGFL-C averages on the server; IGFL-S trains with plain SGD on the clients. Here w^(-1) = w^0, and
Delta_i and Delta'_i are zero before a client's first round.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..client import SGD, Correction, LocalContext
from ..core.algorithm import Algorithm, Joinable, Measurable, PerClient, ServerTraits, change
from ..core.dense import column_blocks
from ..core.effect import Effect, Mechanism, total_variation
from ..core.options import Fraction
from ..core.params import Params, as_slice, choose
from ..core.payload import Broadcast, LocalState, MixingMatrices, Payload
from ..server.average import Average, AverageState, Weighting, client_weights, mean_update, store_weights
from ..server.products import flatten
from ..server.wrapper import ServerWrapper, attach_extra
from .table import Family, method


@dataclass(frozen=True)
class GroupCorrection(Correction):
    """Gradient of IGFL-C: g + (g + Delta_i / (lr T)) / |S| - D / (lr T), for T local steps (Algorithm 2).

    The server sends D, the last update of the global model. Delta_i is the client's own last update, times
    `stale_decay` for every round that the client missed. Clients whose upload is not used take plain steps.
    """

    stale_decay: float = 1.0

    required_extras: ClassVar[dict[str, str]] = {"D": "GlobalUpdateWrapper"}
    mechanism = Mechanism("steps", "steps without the last updates", "one without the last updates")
    suits_optimizers = False

    def init_local_state(self, w0: Params) -> LocalState:
        return {"delta": w0.zeros(), "delta_round": Params(round=next(iter(w0.values())).new_zeros(()))}

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        """Return the corrected gradient; personal tensors stay uncorrected."""
        global_update, context = local.sent.extra["D"], local.context
        own = g.only(global_update)
        missed = context.round - 1 - local.local_state["delta_round"]["round"]
        delta = local.local_state["delta"].only(global_update) * self.stale_decay**missed
        length = context.lr * context.n_steps
        corrected = Params({**g, **(own + (own + delta / length) / context.cohort_size - global_update / length)})
        return choose(context.is_uploaded, corrected, g)

    def finish(self, w: Params, local: LocalContext) -> tuple[dict[str, Params], LocalState]:
        last = local.local_state["delta_round"]["round"]
        now = Params(round=local.context.round.to(last.dtype))
        new = {"delta": w - local.start, "delta_round": now}
        return {}, {k: choose(local.context.is_uploaded, v, local.local_state[k]) for k, v in new.items()}


AttentionKind = Literal["self", "global", "time"]
TimeForm = Literal["T1", "T2", "T3"]

MAX_ATTENTION_CLIENTS = 1_000
"""Clients of whom the attention matrix is kept, for people to look at."""

UPDATE_WEIGHTS = Mechanism("weights", "weights without attention", "one without attention")


class AttentionState(AverageState, total=False):
    """The state of an average; the effect of the last round; for `time`, the last updates; the attention matrix."""

    effect: Tensor
    delta: PerClient[Params]
    attention: Tensor


@dataclass(frozen=True)
class UpdateAttention(Average[AttentionState], Joinable[AttentionState], Measurable):
    """Server rule of IGFL-S: w <- w + beta sum_j b_j Delta_j, Delta_j = upload_j - sent_j; b_j = sum_i p_i A[i, j].

    A[i, :] = softmax_j of (log p_j + <q_i, Delta_j>), with plain dot products over the whole model in float64. p_i is
    1 / |S|, or proportional to samples. In the paper (equation 11, Algorithm 3), p is uniform and cancels.

    Attributes:
        attention: `self`: q_i = Delta_i; `global`: q_i = sum_j p_j Delta_j; `time`: q_i = Delta'_i, the update before
            (zero at first), which the server keeps for every client.
        form: form of `time`; the paper has three. `T1`: Algorithm 3; `T2`: the displayed formula, b_j = A[j, j], which
            does not sum to 1; `T3`: the displayed score, normalised:
            b_j = softmax_j of (log p_j + <Delta'_j, Delta_j>).
    """

    weighting: Weighting = "uniform"
    attention: AttentionKind = "self"
    form: TimeForm = "T3"

    traits = ServerTraits(AttentionState)

    def init(self, w0: Params, n_clients: int) -> AttentionState:
        state = super().init(w0, n_clients)
        if self.attention == "time":
            state["delta"] = w0.zeros().copies(n_clients)
        if not self._single and n_clients <= MAX_ATTENTION_CLIENTS:
            state["attention"] = torch.zeros(n_clients, n_clients, dtype=torch.float64)
        state["effect"] = torch.zeros((), dtype=torch.float64)
        return state

    @property
    def _single(self) -> bool:
        """True if each update has one score, instead of one score per client."""
        return self.attention == "global" or (self.attention == "time" and self.form == "T3")

    def aggregate(
        self, state: AttentionState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> AttentionState:
        p = client_weights(n, self.weighting)
        b = self.weights(state, ids, sent.params, uploads.params, p)
        new: AttentionState = {
            "w": state["w"] + self.beta * mean_update(b, sent.params, uploads.params),
            "p": store_weights(state["p"], ids, b),
            "effect": torch.tensor(total_variation(b[None].cpu(), p[None].cpu()), dtype=torch.float64),
        }
        if self.attention == "time":
            last = state["delta"]
            for name, after in uploads.params.items():
                last.only([name]).put_rows(ids, Params({name: after - sent.params[name]}))
            new["delta"] = last
        if "attention" in state:
            new["attention"] = state["attention"]
        return new

    def measure_effects(self, state: AttentionState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the weights of the last round beside the weights of plain averaging."""
        return (Effect(UPDATE_WEIGHTS, float(state["effect"])),)

    def weights(self, state: AttentionState, ids: Tensor, sent: Params, uploads: Params, p: Tensor) -> Tensor:
        """Return the weights b (C,) of the cohort's updates; p (C,) are the shares of the clients."""
        if not uploads:  # nothing is shared
            return p
        scores = self._scores(state, ids, sent, uploads, p)
        if scores.dim() == 1:
            return torch.softmax(p.log() + scores, 0)
        attention = torch.softmax(p.log() + scores, 1)
        if "attention" in state:
            state["attention"] = state["attention"].to(attention).zero_()
            state["attention"][ids[:, None], ids] = attention
        if self.attention == "time" and self.form == "T2":
            return attention.diagonal()
        return p @ attention

    def _scores(self, state: AttentionState, ids: Tensor, sent: Params, uploads: Params, p: Tensor) -> Tensor:
        """Return <q_i, Delta_j> (C, C) in float64; (C,) if each update has one score."""
        out = p.new_zeros((len(p),) if self._single else (len(p), len(p)))
        for name, tensor in uploads.items():
            after, before = flatten(tensor), flatten(sent[name])
            if self.attention == "time":
                last = flatten(state["delta"].only([name]).rows(as_slice(ids))[name])
            for c in column_blocks(2 * len(p), after.shape[1], after.device):
                delta = (after[:, c] - before[:, c]).double()
                query = last[:, c].double() if self.attention == "time" else delta
                if self.attention == "global":
                    out += delta @ (p @ delta)
                elif self._single:
                    out += (query * delta).sum(1)
                else:
                    out.addmm_(query, delta.T)
        return out

    def broadcast(self, state: AttentionState, ids: Tensor) -> Broadcast:
        """Send the same global model to all clients.

        All rows of its mixing matrix are b, unless b does not sum to 1. The matrix A, `attention`, comes beside it.
        """
        broadcast, p = super().broadcast(state, ids), state["p"]
        if self.attention == "time" and self.form == "T2":
            broadcast = broadcast._replace(mixing=None)
        attention = state.get("attention", p[:0])
        if not attention.any():  # before the first aggregation
            return broadcast
        cohort = attention.any(1).nonzero().flatten()
        weights = {"model": p[cohort].expand(len(ids), -1)} if broadcast.mixing else {}
        mixing = MixingMatrices(ids, cohort, {**weights, "attention": attention[ids][:, cohort]})
        return broadcast._replace(mixing=mixing)

    def add_clients(self, state: AttentionState, n_new: int) -> AttentionState:
        new = super().add_clients(state, n_new)
        if "attention" in state:
            new["attention"] = pad(state["attention"], (0, n_new, 0, n_new))
        return new


class GlobalUpdateState(TypedDict):
    """The entry beside those of the inner rule."""

    D: Params


@dataclass(frozen=True)
class GlobalUpdateWrapper(ServerWrapper[GlobalUpdateState]):
    """Server rule of IGFL-C: sends D = w^r - w^(r-1), the last update of the global model; zero at first.

    If the inner rule has no global model, D is the mean update of the cohort. Source: Algorithm 2, line 2.
    """

    def init(self, w0: Params, n_clients: int) -> GlobalUpdateState:
        return change(super().init(w0, n_clients), D=w0.zeros())

    def broadcast(self, state: GlobalUpdateState, ids: Tensor) -> Broadcast:
        return attach_extra(super().broadcast(state, ids), "D", state["D"], ids)

    def aggregate(
        self, state: GlobalUpdateState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> GlobalUpdateState:
        new = super().aggregate(state, ids, sent, uploads, n)
        before, after = self.global_model(state), self.global_model(new)
        if before is None or after is None:
            return change(new, D=mean_update(client_weights(n, "uniform"), sent.params, uploads.params))
        return change(new, D=after - before)

    needed_sums = ServerWrapper.needed_sums

    def skip_round(self, state: GlobalUpdateState) -> GlobalUpdateState:
        return change(super().skip_round(state), D=state["D"].zeros())


@method(
    Family.GLOBAL,
    "one model, moved by attention, and its last update",
    "SGD that repeats the last update",
    tune={"stale_decay": (0.5, 1.0)},
)
def igfl(
    *,
    attention: AttentionKind = "time",
    time_form: TimeForm = "T3",
    stale_decay: Fraction = 1.0,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """One global model: local steps repeat the group's last update, and the server weighs updates by attention.

    Source: Huang et al. (2021), Algorithms 2 and 3 and equation 11.

    Args:
        attention: query q_i: `self` is Delta_i, `global` is the mean of all Delta_j, `time` is Delta'_i, the client's
            previous update. The paper's Table 1 has `time`.
        time_form: form of `time`: `T1` is Algorithm 3; `T2` is the displayed formula, b_j = A[j, j] of T1, whose sum is
            not 1; `T3` normalises the displayed scores. Other queries ignore the form.
        stale_decay: factor of Delta_i for every round that the client missed: 1 keeps Delta_i, as in the paper; 0 drops
            Delta_i.
        weighting: shares p_j of the clients in softmax and mean: `uniform`, as in the paper, or by training samples.
    """
    return Algorithm(
        SGD((GroupCorrection(stale_decay),)),
        GlobalUpdateWrapper(UpdateAttention(weighting, attention=attention, form=time_form)),
        evaluation_point="received",
    )


@method(
    Family.GLOBAL,
    "one average and its last update",
    "SGD that repeats the last update",
    tune={"stale_decay": (0.5, 1.0)},
)
def igfl_c(*, stale_decay: Fraction = 1.0, weighting: Weighting = "uniform") -> Algorithm:
    """One average: local steps repeat the group's last update.

    Source: Huang et al. (2021), Algorithm 2.

    Args:
        stale_decay: factor of Delta_i for every round that the client missed: 1 keeps Delta_i, as in the paper; 0 drops
            Delta_i.
        weighting: weights p_k in the average: `uniform`, as in the paper, or by training samples.
    """
    return Algorithm(
        SGD((GroupCorrection(stale_decay),)), GlobalUpdateWrapper(Average(weighting)), evaluation_point="received"
    )


@method(Family.GLOBAL, "one model; updates weighted by attention", "SGD")
def igfl_s(
    *, attention: AttentionKind = "time", time_form: TimeForm = "T3", weighting: Weighting = "uniform"
) -> Algorithm:
    """One global model: the server weighs the clients' updates by attention among them.

    Source: Huang et al. (2021), Algorithm 3 and equation 11. Options: see `igfl`.
    """
    return Algorithm(
        SGD(), UpdateAttention(weighting, attention=attention, form=time_form), evaluation_point="received"
    )
