"""Attune, a method of this package; no paper describes it. docs/algorithms/attune.md gives reasons and measurements.

    @misc{developers2026attune,
      author = {Developers, FedAttune},
      title = {Attune: Predictions of a Group's Model and an Own Model, Weighted by Each Client},
      year = {2026},
      howpublished = {docs/algorithms/attune.md of FedAttune}
    }

Rules, with the model w_g of the client's group g, its own model v_i, and its class shares pi_i:

    used as  p(y | x) = s_i softmax(w_g(x) + c_i log pi_i) + (1 - s_i) softmax(v_i(x))
    client   L_i[e]: loss on the validation rows of every expert e = (s, c), before training
             (s_i, c_i) <- mean over e with weights proportional to exp(-n_i L_i[e] - m L[e])
             theta_i <- w_g and u_i from its last value: SGD on the same batches;  uploads theta_i and L_i
             v_i <- mean of u_i after each of these steps
    server   groups: average linkage by the likeness of classes in the first updates of the last layer; no small
                   ones, and none at all unless they explain these updates
             D_g = sum_k p_k (theta_k - w_g) over the group;  a_g = sum_k p_k ||theta_k - w_g||^2 / (2 ||D_g||^2)
             V_g <- beta V_g + clip(a_g, 1, stretch) D_g;  w_g <- w_g + V_g;  L <- mean of L_k, weighted by n_k

From their second value on, L_i and L are means of the new and the old value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field
from torch import Tensor

from ..client import RunningMean, add_to_mean
from ..core.algorithm import (
    Algorithm,
    ClientUpdate,
    Discardable,
    Finished,
    Joinable,
    LocalPlan,
    PerClient,
    Probe,
    Probing,
    RowWeighing,
    ServerTraits,
    change,
)
from ..core.options import NonNegative
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Broadcast, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import Weighting, client_weights, weighted_sum
from ..server.class_groups import MIN_SHARE, assign_groups, find_class_rows
from .table import Family, method
from .twins import GUARD, TwinNetwork, set_guards

Guard = Literal["losses", "equal", "shared"]
"""Weights of the experts: by their losses, equal, or the shared model alone."""

EXPERTS = ((0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0))
"""Share s of the shared model, and weight c of the class shares, of each expert; all without class shares come with c
= 0."""

SHARED_ALONE = EXPERTS.index((1.0, 0.0))

MEMORY = 0.5
"""Weight of the losses of earlier rounds."""

MIN_PROBABILITY = 1e-4
"""Probability below which a prediction counts as equally wrong, so that one row cannot decide."""

MAX_GROUPS = int(1 / MIN_SHARE)

EARLY_UPLOADS = 3
"""Uploads of each client that tell its group: they start from nearly the same model, so they can be compared."""


class _Carry(NamedTuple):
    w: Params  # the shared model in training, and the own model in use
    losses: RunningMean[Tensor]
    own: Params  # the own model in training
    average: Params


@dataclass(frozen=True)
class AttuneClient(ClientUpdate, Probing, RowWeighing):
    """Client rule of Attune: trains the shared and the own model, and weighs them by validation rows.

    `rows` is the option `prior_rows` of `attune`, `average` is `average_own`.
    """

    rows: float = 20.0
    guard: Guard = "losses"
    average: bool = True

    plan = LocalPlan(probe=Probe("validation"), extras={"losses": "AttuneServer"})

    def init_local_state(self, w0: Params) -> LocalState:
        like = next(iter(w0.values()))
        losses = Params(mean=like.new_zeros(len(EXPERTS)), n=like.new_zeros(()))
        return {"losses": losses, "own": _select_own(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        n = torch.zeros_like(context.n_steps)
        own = local_state["own"]
        return _Carry(sent.params, RunningMean(n.expand(len(EXPERTS)), n), own, own.zeros())

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        return carry._replace(losses=add_to_mean(carry.losses, batch, self._score(carry.w, batch, loss)))

    def _score(self, w: Params, batch: Batch, loss: Loss) -> Tensor:
        """Return the mean loss of every expert (E,) over a batch."""
        x, y, *weight = batch
        losses = self.score_rows(w, x, y, loss.predict)
        weights = weight[0] if weight else torch.ones_like(losses[0])
        weights = weights / weights.sum()
        return torch.stack([(each * weights).sum() for each in losses])

    def score_rows(self, w: Params, x: Tensor, y: Tensor, predict: Callable[[Params, Tensor], Tensor]) -> list[Tensor]:
        """Return the losses (B,) of every expert, from one pass of both models."""
        own, plain, shifted = predict(set_guards(w, (0, 1, 1), (0, 0, 1)), x)
        each = []
        for s, c in EXPERTS:
            if y.is_floating_point():
                each.append((s * plain + (1 - s) * own).squeeze(1).sub(y).square())
            else:
                right = own.softmax(1).gather(1, y[:, None]).squeeze(1)
                by_shared = (plain + c * (shifted - plain)).softmax(1).gather(1, y[:, None]).squeeze(1)
                each.append(-(s * by_shared + (1 - s) * right).clamp_min(MIN_PROBABILITY).log())
        return each

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        w = Params({**carry.w, **carry.own})
        new = w - context.lr * grad(w, batch)
        own = _select_own(new)
        in_use = {k: carry.w[k] for k in (*own, *GUARD)}
        average = carry.average + (1 / context.n_steps) * own if self.average else carry.average
        return carry._replace(w=Params({**new, **in_use}), own=own, average=average)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        old = local_state["losses"]
        memory = MEMORY * (old["n"] > 0).to(old["mean"].dtype)
        losses, n = carry.losses
        report = Params(mean=losses, n=n)
        has_rows = n > 0
        mean = torch.where(has_rows, memory * old["mean"] + (1 - memory) * losses, old["mean"])
        n = torch.where(has_rows, n, old["n"])
        share, classes = self._weigh(mean, n, sent.extra["losses"]["mean"])
        has_steps = context.n_steps > 0
        new = carry.average if self.average else carry.own
        own = new.map(lambda a, b: torch.where(has_steps, a, b), _select_own(carry.w))
        w = Params({**carry.w, **own, **dict(zip(GUARD, (share, classes), strict=True))})
        return Payload(w, {"losses": report}), {"losses": Params(mean=mean, n=n), "own": carry.own}

    def weigh_rows(self, sums: Tensor, others: Tensor) -> Params:
        weights = self._weigh(sums, sums.new_ones(()), others)
        return Params(dict(zip(GUARD, (one[:, None] for one in weights), strict=True)))

    def _weigh(self, mean: Tensor, n: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and c of the mixture of all experts, by mean losses (..., E) of n rows and those of others (E,)."""
        s, c = mean.new_tensor(EXPERTS).unbind(1)
        if self.guard == "shared":
            weights = torch.zeros_like(mean).index_fill(-1, torch.tensor(SHARED_ALONE, device=mean.device), 1.0)
        else:
            weights = torch.softmax(-(n * mean + self.rows * others), -1)
            if self.guard == "equal":
                weights = torch.full_like(weights, 1 / len(EXPERTS))
        share = (weights * s).sum(-1)
        return share, (weights * s * c).sum(-1) / share.clamp_min(1e-6)


def _select_own(w: Params) -> Params:
    return Params({k: v for k, v in w.items() if k.startswith("own.")})


class AttuneState(TypedDict):
    """Models and velocities of the groups; of all clients, the group, what tells it, and weights; mean losses."""

    w: Params
    velocity: Params
    group: PerClient[Tensor]
    class_rows: PerClient[Tensor]
    n_uploads: PerClient[Tensor]
    p: PerClient[Tensor]
    losses: Params


@dataclass(frozen=True)
class AttuneServer(Joinable[AttuneState], Discardable):
    """Server rule of Attune: one model for each group of clients whose classes look alike.

    `beta` is the option `server_momentum` of `attune`.
    """

    beta: float = 0.6
    stretch: float = 4.0
    likeness: float = 0.1
    weighting: Weighting = "samples"

    traits = ServerTraits(AttuneState)

    def init(self, w0: Params, n_clients: int) -> AttuneState:
        n_groups = min(MAX_GROUPS, n_clients)
        like = next(iter(w0.values()))
        rows = find_class_rows(w0)
        return {
            "w": w0.copies(n_groups),
            "velocity": w0.zeros().copies(n_groups),
            "group": torch.zeros(n_clients, dtype=torch.int64, device=like.device),
            "class_rows": like.new_zeros((n_clients, *(() if rows is None else rows.shape))),
            "n_uploads": torch.zeros(n_clients, dtype=torch.int64, device=like.device),
            "p": torch.zeros(n_clients, dtype=torch.float64, device=like.device),
            "losses": Params(mean=like.new_zeros(len(EXPERTS))),
        }

    def broadcast(self, state: AttuneState, ids: Tensor) -> Broadcast:
        w, group, p = state["w"], state["group"], state["p"]
        own, columns = group[ids], p.nonzero().flatten()
        one = len(ids) > 0 and bool((own == own[0]).all())
        models = w.rows(int(own[0])).repeat(len(ids)) if one else w.rows(own)
        mixing = None
        if len(columns):
            weights = (own[:, None] == group[columns]).to(p.dtype) * p[columns]
            total = weights.sum(1, keepdim=True)
            if bool((total > 0).all()):
                mixing = MixingMatrices(ids, columns, {"model": weights / total})
        losses = state["losses"].repeat(len(ids))
        return Broadcast(Payload(models, {"losses": losses}), mixing)

    def aggregate(self, state: AttuneState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> AttuneState:
        updates = uploads.params - sent.params
        state = self._find_groups(state, ids, updates)
        w, velocity = state["w"], state["velocity"]
        group = state["group"][ids]
        p = client_weights(n, self.weighting)
        moved: Tensor = group.unique()  # type: ignore[no-untyped-call]
        steps = []
        for g in moved.tolist():
            rows = (group == g).nonzero().flatten()
            mean = self._stretch(p[rows] / p[rows].sum(), updates.rows(rows))
            steps.append(self.beta * velocity.rows(g) + mean)
        step = Params({k: torch.stack([one[k] for one in steps]) for k in w})
        new = w.rows(moved) + step
        all_p = torch.zeros_like(state["p"]).index_copy_(0, ids, p)
        return change(
            state,
            w=w.map(lambda a, b: a.index_copy(0, moved, b), new),
            velocity=velocity.map(lambda a, b: a.index_copy(0, moved, b), step),
            p=all_p,
            losses=self._average_losses(state["losses"], uploads.extra["losses"]),
        )

    def _stretch(self, p: Tensor, updates: Params) -> Params:
        """Return the mean update, longer where the updates cancel each other out."""
        mean = weighted_sum(p, updates)
        squares = torch.stack([v.flatten(1).square().sum(1) for v in updates.values()]).sum(0)
        factor = (p.to(squares.dtype) * squares).sum() / (2 * squared_norm(mean)).clamp_min(1e-30)
        return factor.clamp(1.0, self.stretch) * mean

    @staticmethod
    def _average_losses(old: Params, reports: Params) -> Params:
        n = reports["n"].clamp_min(0)
        if not n.sum() > 0:
            return old
        mean = (n[:, None] * reports["mean"]).sum(0) / n.sum()
        return Params(mean=MEMORY * old["mean"] + (1 - MEMORY) * mean if old["mean"].any() else mean)

    def _find_groups(self, state: AttuneState, ids: Tensor, updates: Params) -> AttuneState:
        """Return the state with the groups that early uploads tell; each goes on with the model of most members."""
        rows, n_uploads = find_class_rows(updates, n_axes=1), state["n_uploads"]
        early = (n_uploads[ids] < EARLY_UPLOADS).nonzero().flatten()
        if rows is None or self.likeness <= -1 or not len(early):
            return state
        sums = state["class_rows"].index_add(0, ids[early], rows[early])
        n_uploads = n_uploads.index_add(0, ids[early], torch.ones_like(early))
        n_groups = len(next(iter(state["w"].values())))
        group, source = assign_groups(sums, n_uploads, ids[early], state["group"], n_groups, self.likeness)
        w, velocity = state["w"].rows(source), state["velocity"].rows(source)
        return change(state, w=w, velocity=velocity, group=group, class_rows=sums, n_uploads=n_uploads)

    def discard_uploads(self, state: AttuneState, ids: Tensor) -> AttuneState:
        """Forget the class rows of clients `ids`, so that they form no groups."""
        rows, n_uploads = (state["class_rows"].index_fill(0, ids, 0.0), state["n_uploads"].index_fill(0, ids, 0))
        return change(state, class_rows=rows, n_uploads=n_uploads)

    def global_model(self, state: AttuneState) -> Params | None:
        """Return None: there is a model for every group."""
        return None

    def newcomer_model(self, state: AttuneState) -> Params:
        return state["w"].rows(int(state["group"].mode().values))

    def add_clients(self, state: AttuneState, n_new: int) -> AttuneState:
        group = state["group"]
        new = super().add_clients(state, n_new)
        largest = group.mode().values.expand(n_new)
        return change(new, group=torch.cat([group, largest]))


@method(
    Family.PERSONAL_MODEL,
    "one model per group, with momentum",
    "SGD; weighs the shared and an own model's predictions",
    tune={"server_momentum": (0.0, 0.6, 0.9)},
)
def attune(
    *,
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.6,
    stretch: Annotated[float, Field(ge=1)] = 4.0,
    likeness: Annotated[float, Field(ge=-1, le=1)] = 0.1,
    prior_rows: NonNegative = 20.0,
    class_shares: bool = True,
    guard: Guard = "losses",
    average_own: bool = True,
    weighting: Weighting = "samples",
) -> Algorithm:
    """A shared model for every group of clients that are found to be alike, and an own model; each client weighs both.

    Source: this package, docs/algorithms/attune.md.

    Args:
        server_momentum: momentum of each group's model on the server; 0 for none.
        stretch: most times that a group's mean update counts where its clients' updates differ, as in FedExP; 1 for
            no stretching.
        likeness: minimum likeness of the classes of clients that share a model, from -1 (all clients share one) to 1.
        prior_rows: rows for which all clients' mean losses count beside a client's own validation rows.
        class_shares: whether the shared model's predictions may use the client's class shares.
        guard: weights of the shared and the own model: by `losses` on validation rows, `equal` for all experts, or
            the `shared` model alone.
        average_own: whether a client uses the mean of its own model over the last round's steps, instead of the last.
        weighting: weights p_k in the mean update of a group: by training samples, or `uniform`.
    """
    return Algorithm(
        AttuneClient(prior_rows, guard, average_own),
        AttuneServer(server_momentum, stretch, likeness, weighting),
        personal=NamedParameters(("own", "guard")),
        network=TwinNetwork(1.0 if guard == "shared" else 0.5, class_shares),
        evaluation_point="received",
    )
