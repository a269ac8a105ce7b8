"""Attune, a method of this package; no paper describes it. See docs/algorithms/attune.md.

Rules, with the received model w of the client's group, its own model v, and its class shares pi_i:

    used as  p(y | x) = s_i softmax(w(x) + c_i log pi_i) + (1 - s_i) softmax(v(x))
    client   before training, on its validation rows: L_i[e], the loss for e = (s, c) of each expert; and
             (s_i, c_i) = mean over e with the weights exp(-n_i L_i[e] - rows mean_k L_k[e])
             theta <- w, then SGD;  v <- v - lr (g(v) + lam s_i (v - w)), on the same batches
    server   groups: average linkage of the likeness of classes, from sums of the last layer's updates
             V_g <- beta V_g + sum_k p_k (theta_k - w_g) over the group;  w_g <- w_g + V_g
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.algorithm import Algorithm, ClientUpdate, ServerUpdate
from ..core.effect import Effect, Mechanism
from ..core.network import MethodModule, Network
from ..core.options import NonNegative
from ..core.params import Params, select_prefix, add_prefix, square_length
from ..core.payload import Batch, Broadcast, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext, ServerState
from ..core.selectors import NamedParameters
from ..core.task import compute_loss
from ..server.average import Weighting, client_weights, weighted_sum
from ..server.class_groups import compare_classes, group_clients
from .table import Family, method

EXPERTS = ((0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0))
"""Share of the shared model and weight of the class shares, (s, c), that a client compares."""

MEMORY = 0.5
"""Weight of earlier rounds in a client's losses."""

MAX_LOSS = 10.0
"""Largest mean loss of an expert that counts."""

PRIOR_COUNT = 0.5
"""Rows of each class that are added to a client's own, so that no class is impossible."""

MAX_GROUPS, MAX_COMPARED = 16, 256
"""Most groups, and most clients that are compared with each other; others join the most similar group."""

MAX_CLASSES, MAX_FEATURES = 100, 512
"""Most classes, and features of the last layer, that are compared."""

import os
EXP = float(os.environ.get("EXP","0"))
SEEN = float(os.environ.get("SEEN","3"))
CAP = int(os.environ.get("CAP","5"))
NORM = int(os.environ.get("NORM","0"))

INFORMATIVE = 0.5
"""Length of the updates of a round, as a ratio to the longest so far, from which on they tell of tasks."""


class TwinModule(MethodModule):
    """Predicts with a shared model and a client's own model.

    Args:
        model: the user's model.
        n_outputs: number of its outputs.

    """

    log_shares: Tensor
    client_scalars: ClassVar[Mapping[str, str]] = {"shared": "guard.share", "classes": "guard.classes"}

    def __init__(self, model: nn.Module, n_outputs: int) -> None:
        super().__init__()
        self.shared, self.own = model, copy.deepcopy(model)
        like = next(p for p in model.parameters() if p.requires_grad)
        self.guard = nn.ParameterDict({"share": like.new_full((), 0.5), "classes": like.new_full((), 0.5)})
        self.register_buffer("log_shares", like.new_zeros(n_outputs))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probabilities (B, C) of the mixture, or the number (B, 1); in training, both outputs."""
        shared, own = self.shared(x), self.own(x)
        if self.training:
            return shared, own
        share = self.guard["share"]
        if shared.shape[1] == 1:
            return share * shared + (1 - share) * own  # type: ignore[no-any-return]
        shared = shared + self.guard["classes"] * self.log_shares
        mixture = share * shared.softmax(1) + (1 - share) * own.softmax(1)
        return mixture.clamp_min(1e-12).log()  # type: ignore[no-any-return]

    def objective(self, output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Return the sum of both models' losses."""
        shared, own = output
        return compute_loss(shared, batch) + compute_loss(own, batch)


@dataclass(frozen=True)
class TwinNetwork(Network):
    """Puts an own model beside the shared one."""

    @property
    def generic(self) -> bool:
        """Return False."""
        return False

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        """Copy the model."""
        with torch.no_grad():
            n_outputs = copy.deepcopy(model).eval()(x.to(next(model.parameters()))).shape[1]
        return TwinModule(copy.deepcopy(model), n_outputs)

    def client_buffers(self, label_counts: Tensor) -> Params:
        """Return the logarithm of each client's class shares, relative to equal shares."""
        n_classes = label_counts.shape[1]
        if n_classes < 2:
            return Params()
        counts = label_counts + PRIOR_COUNT
        return Params(log_shares=(n_classes * counts / counts.sum(1, keepdim=True)).log())


class _Carry(NamedTuple):
    w: Params
    anchor: Params
    share: Tensor
    losses: Tensor
    n: Tensor


@dataclass(frozen=True)
class AttuneClient(ClientUpdate):
    """Client rule of Attune.

    Attributes:
        lam: strength of the pull of the own model to the shared one, where the shared model has all trust.
        rows: rows for which the other clients' mean losses count.

    """

    lam: float = 1.0
    rows: float = 20.0
    criterion: str = "ce"

    @property
    def required_extras(self) -> dict[str, str]:
        return {"losses": "AttuneServer"}

    @property
    def probe_part(self):
        return "validation"

    def init_local_state(self, w0: Params) -> LocalState:
        like = next(iter(w0.values()))
        return {"losses": Params(mean=like.new_zeros(len(EXPERTS)), n=like.new_zeros(()))}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        w = sent.params
        n = torch.zeros_like(context.n_steps)
        return _Carry(w, select_prefix(w, "shared."), w["guard.share"], n.expand(len(EXPERTS)), n)

    def probe_passes(self, local_state: LocalState) -> Tensor:
        return torch.ones(())

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        x, _, *weight = batch
        n_batch = weight[0].sum() if weight else torch.full_like(carry.n, len(x))
        n = carry.n + n_batch
        each = self._score(carry.w, batch, loss).to(carry.losses.dtype)
        return carry._replace(losses=carry.losses + (each - carry.losses) * (n_batch / n), n=n)

    def _with_expert(self, w: Params, share: float, classes: float) -> Params:
        like = w["guard.share"]
        return Params({**w, "guard.share": torch.full_like(like, share), "guard.classes": torch.full_like(like, classes)})

    def _score(self, w: Params, batch: Batch, loss: Loss) -> Tensor:
        x, y, *weight = batch
        weights = weight[0] if weight else torch.ones(len(x), dtype=w["guard.share"].dtype)
        weights = weights / weights.sum()
        own, plain, shifted = (loss.predict(self._with_expert(w, s, c), x) for s, c in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)))
        if y.is_floating_point():
            each = [((s * plain + (1 - s) * own)[:, 0] - y).square() for s, _ in EXPERTS]
            return torch.stack([(e * weights).sum() for e in each])
        out = []
        onehot = torch.zeros_like(own).scatter(1, y[:, None], 1.0)
        for s, c in EXPERTS:
            p = s * (plain + c * (shifted - plain)).softmax(1) + (1 - s) * own.softmax(1)
            if self.criterion == "ce":
                e = -p.gather(1, y[:, None])[:, 0].clamp_min(1e-4).log()
            elif self.criterion == "brier":
                e = (p - onehot).square().sum(1)
            else:
                e = 1.0 * (p.gather(1, y[:, None])[:, 0] < p.amax(1)).to(p.dtype) + 0.1 * (p - onehot).square().sum(1)
            out.append((e * weights).sum())
        return torch.stack(out)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        g = grad(carry.w, batch)
        w = dict(carry.w)
        for k, d in g.items():
            if k.startswith("own."):
                d = d + self.lam * carry.share * (w[k] - carry.anchor[k.removeprefix("own.")])
            if not k.startswith("guard."):
                w[k] = w[k] - context.lr * d
        return carry._replace(w=Params(w))

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> tuple[Payload, LocalState]:
        old = local_state["losses"]
        known = (old["n"] > 0).to(carry.losses.dtype) * MEMORY
        has = carry.n > 0
        losses = torch.where(has, known * old["mean"] + (1 - known) * carry.losses, old["mean"])
        n = torch.where(has, carry.n, old["n"])
        others = sent.extra["losses"]["mean"]
        weights = torch.softmax(-(n * losses + self.rows * others), 0)
        s, c = weights.new_tensor([e[0] for e in EXPERTS]), weights.new_tensor([e[1] for e in EXPERTS])
        share = (weights * s).sum()
        classes = (weights * s * c).sum() / share.clamp_min(1e-6)
        w = Params({**carry.w, "guard.share": share.to(carry.share.dtype), "guard.classes": classes.to(carry.share.dtype)})
        report = Params(mean=losses, n=n)
        return Payload(w, {"losses": report}), {"losses": report}


@dataclass(frozen=True)
class AttuneServer(ServerUpdate):
    """Server rule of Attune: one model with momentum for each group of clients whose classes look alike."""

    beta: float = 0.9
    least: float = 0.2
    weighting: Weighting = "samples"

    per_client: ClassVar[tuple[str, ...]] = ("group", "head", "seen", "p")

    def init(self, w0: Params, n_clients: int) -> ServerState:
        shared = w0
        head = _find_head(shared)
        like = next(iter(shared.values()))
        rows = like.new_zeros((n_clients, *(shared[head][:, :: _stride(shared[head])].shape if head else (0, 0))))
        return {
            "w": w0.copies(MAX_GROUPS),
            "v": w0.zeros().copies(MAX_GROUPS),
            "group": torch.zeros(n_clients, dtype=torch.int64, device=like.device),
            "head": rows,
            "seen": torch.zeros(n_clients, dtype=torch.int64, device=like.device),
            "p": torch.zeros(n_clients, dtype=torch.float64, device=like.device),
            "longest": like.new_zeros(()),
            "losses": Params(mean=like.new_zeros(len(EXPERTS))),
        }

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        w, group, p = cast(Params, state["w"]), cast(Tensor, state["group"]), cast(Tensor, state["p"])
        own = group[ids]
        if (own == own[0]).all():
            sent = w.rows(int(own[0])).repeat(len(ids))
        else:
            sent = w.rows(own)
        columns = p.nonzero().flatten()
        mixing = None
        if len(columns):
            alike = (own[:, None] == group[columns]).double() * p[columns]
            has = alike.sum(1) > 0
            if has.all():
                mixing = MixingMatrices(ids, columns, {"model": alike / alike.sum(1, keepdim=True)})
        losses = cast(Params, state["losses"]).repeat(len(ids))
        return Broadcast(Payload(sent, {"losses": losses}), mixing)

    def aggregate(self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> ServerState:
        state = dict(state)
        w, v = cast(Params, state["w"]), cast(Params, state["v"])
        group = cast(Tensor, state["group"])
        p = client_weights(n, self.weighting)
        delta = uploads.params.map(lambda a, b: a - b, sent.params)
        state |= self._find_groups(state, ids, delta)
        group = cast(Tensor, state["group"])
        w, v = cast(Params, state["w"]), cast(Params, state["v"])
        for g in group[ids].unique().tolist():
            rows = (group[ids] == g).nonzero().flatten()
            share = p[rows] / p[rows].sum()
            mean = weighted_sum(share, delta.rows(rows))
            if EXP:
                each = sum(t.flatten(1).square().sum(1) for t in delta.rows(rows).values())
                eta = ((share * each).sum() / (2 * square_length(mean)).clamp_min(1e-20)).clamp(1, EXP)
                mean = eta.to(like_(mean)) * mean
            for k in w:
                v[k][g] = self.beta * v[k][g] + mean[k]
                w[k][g] = w[k][g] + v[k][g]
        report = uploads.extra["losses"]
        rows_ = report["n"].sum()
        if rows_ > 0:
            state["losses"] = Params(mean=(report["mean"] * report["n"][:, None]).sum(0) / rows_)
        all_p = cast(Tensor, state["p"]).zero_().index_copy_(0, ids, p)
        state["p"] = all_p
        return state

    def _find_groups(self, state: ServerState, ids: Tensor, delta: Params) -> ServerState:
        head, seen, group = (cast(Tensor, state[k]) for k in ("head", "seen", "group"))
        name = _find_head(cast(Params, state["w"]).rows(0))
        if name is None or not head.shape[1]:
            return {}
        rows = delta[name][:, :, :: _stride(delta[name][0])]
        longest = state["longest"]
        fresh = (seen[ids] < CAP).nonzero().flatten()
        if not len(fresh):
            return {}
        ids, rows = ids[fresh], rows[fresh]
        if NORM: rows = rows / rows.flatten(1).norm(dim=1).clamp_min(1e-30)[:, None, None]
        head = head.index_add(0, ids, rows)
        seen = seen.index_add(0, ids, torch.ones_like(ids))
        known = seen.nonzero().flatten()
        likeness, evidence = compare_classes(head[known])
        trust = seen[known] / (seen[known] + SEEN)
        trust = trust[:, None] * trust
        found = torch.from_numpy(group_clients(likeness * trust, evidence * trust, self.least))
        w, v = cast(Params, state["w"]), cast(Params, state["v"])
        old = group[known]
        # Each new group goes on with the model that most of its clients had; of two, the larger one keeps its place.
        order = sorted(found.unique().tolist(), key=lambda g: -int((found == g).sum()))[:MAX_GROUPS]
        new_group = group.clone()
        parent = {g: int(old[found == g].mode().values) for g in order}
        taken, place = set(), {}
        for g in order:
            place[g] = parent[g] if parent[g] not in taken else None
            if place[g] is not None:
                taken.add(place[g])
        free = [k for k in range(MAX_GROUPS) if k not in taken]
        for g in order:
            if place[g] is None:
                place[g] = free.pop(0)
                for stack in (w, v):
                    for k in stack:
                        stack[k][place[g]] = stack[k][parent[g]]
        for g in found.unique().tolist():
            new_group[known[found == g]] = place.get(g, place[order[0]])
        new_group[seen == 0] = place[order[0]]
        return {"head": head, "seen": seen, "group": new_group, "longest": longest}


def like_(m):
    return next(iter(m.values())).dtype


def _find_head(w: Params) -> str | None:
    matrices = [k for k, t in w.items() if t.dim() == 2]
    return matrices[-1] if matrices and 2 <= len(w[matrices[-1]]) <= MAX_CLASSES else None


def _stride(weight: Tensor) -> int:
    return -(-weight.shape[1] // MAX_FEATURES)


@method(Family.PERSONAL_MODEL, "one average with momentum per group", "SGD; mixes predictions of the shared and an own model")
def attune(*, beta: Annotated[float, Field(ge=0, lt=1)] = 0.6, lam: NonNegative = 0.0, rows: NonNegative = 20.0, likeness: float = float(os.environ.get('LEAST','0.1')), criterion: str = 'ce',  weighting: Weighting = "samples") -> Algorithm:
    return Algorithm(
        AttuneClient(lam, rows, criterion),
        AttuneServer(beta, likeness, weighting),
        personal=NamedParameters(("own", "guard")),
        network=TwinNetwork(),
        headline="received",
    )
