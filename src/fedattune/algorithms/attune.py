"""Attune, a method of this package; no paper describes it. docs/algorithms/attune.md gives reasons and measurements.

    @misc{developers2026attune,
      author = {Developers, FedAttune},
      title = {Attune: Predictions of a Group's Model and an Own Model, Weighted by Each Client},
      year = {2026},
      howpublished = {docs/algorithms/attune.md of FedAttune}
    }

Rules, with the model w_g of the client's group g and its features f, the client's own model v_i, own head h_i and own
intercept b_i, and its class shares pi_i:

    used as  p(y | x) = a_own softmax(v_i(x)) + a_head softmax(w_g(x) + h_i f(x)) + a_intercept softmax(w_g(x) + b_i)
                        + sum over c in {0, 1/2, 1} of a_c softmax(w_g(x) + c log pi_i),  a = sum_e q_i[e] e
    client   L_i[e]: loss on the n_i validation rows of every expert e, a mean of one to three of these predictions,
                     before training; a mean of the new and the old value from the second one on
             q_i[e] proportional to P[e] exp(-n_i L_i[e])
             theta_i <- w_g, v_i, h_i and b_i from their last values: SGD on the same batches, w_g by its own loss alone
             uploads theta_i, q_i - P, and how well another group's model w_h predicts its validation rows:
             d_i = n_i (loss of w_h - loss of w_g), and m_i the same for the mean of both predictions
    server   groups: by the likeness of classes in the first updates of the last layer, if they explain these updates;
                     client i moves to h where d_i is clearly below 0; groups g and h become one where both sums of m_i
                     over their clients are
             V_g <- beta V_g + sum_k p_k (theta_k - w_g) over the group;  w_g <- w_g + V_g
             P <- (P + mean over k of q_k) / 2, with one more client whose q is the same for all e
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field
from torch import Tensor

from ..client import Optimizing, RunningMean, add_to_mean
from ..core.algorithm import (
    Algorithm,
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
from ..core.params import Params, concatenate
from ..core.payload import Batch, Broadcast, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import Weighting, client_weights, weighted_sum
from ..server.class_groups import MAX_GROUPS, assign_groups, find_class_rows
from .table import Family, method
from .twins import GUARD, N_PREDICTORS, TwinNetwork, set_guard

Guard = Literal["losses", "equal", "shared"]
"""Weights of the experts: by their losses, equal, or the shared model alone."""

OWN, HEAD, INTERCEPT, SHARED, FULL = 0, 1, 2, 3, N_PREDICTORS - 1
"""Predictions of a `TwinModule`: of the own model, and of the shared one with the own head, with the own intercept,
alone, and with the whole class shares."""


def _list_experts() -> tuple[tuple[float, ...], ...]:
    """List the means of the own model, the own head and one other prediction with w_g, of each subset of them."""
    sets = {
        chosen
        for shared in range(INTERCEPT, N_PREDICTORS)
        for n in (1, 2, 3)
        for chosen in combinations((OWN, HEAD, shared), n)
    }
    return tuple(tuple((i in one) / len(one) for i in range(N_PREDICTORS)) for one in sorted(sets))


EXPERTS = _list_experts()
"""Weights (6,) of the predictions in each expert."""

SHARED_ALONE = EXPERTS.index(tuple(float(i == SHARED) for i in range(N_PREDICTORS)))

MEMORY = 0.5
"""Weight of earlier rounds in losses, in the prior of the experts, and in the evidence for groups."""

MIN_PROBABILITY = 1e-4
"""Probability below which a prediction counts as equally wrong, so that one row cannot decide."""

MAX_ROW = 2.0
"""Maximum evidence of one row for or against a group, in nats, so that a few outliers move no client."""

MAX_EVIDENCE = 10.0
"""Maximum evidence of all rows of one client, in nats: what a client reports about groups is bounded."""

TO_MOVE, TO_MERGE = -4.0, -2.0
"""Evidence in nats below which a client moves to another group (odds of 55 to 1), and below which two groups merge."""

REPORT = 0.1
"""Scale of what clients report beside models: it should take little of the norm that client privacy allows."""

EARLY_UPLOADS = 3
"""Uploads of each client that tell its group: they start from nearly the same model, so they can be compared."""

PRIOR_STEPS = 5
"""Steps from equal weights to the prior by which rows are weighed for the choice of a method."""

SMALLEST_SQUARE = 1e-24
"""Keeps quotients by a squared error at finite values."""

CANDIDATE = "candidate"
"""Extra with another group's model; it is sent while there are two groups or more."""


class _Carry(NamedTuple):
    w: Params
    losses: RunningMean[Tensor]
    evidence: Tensor  # for another group, and for both groups as one
    is_number: Tensor
    scale: Tensor
    candidate: Params  # another group's model, or nothing
    optimizer: LocalState


@dataclass(frozen=True)
class AttuneClient(Optimizing, Probing, RowWeighing):
    """Client rule of Attune: trains the shared and the own model, and weighs their predictions by validation rows."""

    guard: Guard = "losses"

    plan = LocalPlan(probe=Probe("validation"), extras={"guard": "AttuneServer"})

    def init_local_state(self, w0: Params) -> LocalState:
        like = next(iter(w0.values()))
        losses = Params(mean=like.new_zeros(len(EXPERTS)), n=like.new_zeros(()))
        return {"losses": losses, **self.optimizer.init_local_state(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        zero = torch.zeros_like(context.n_steps)
        losses = RunningMean(zero.expand(len(EXPERTS)), zero)
        scale, candidate = sent.extra["guard"]["scale"], sent.extra.get(CANDIDATE, Params())
        state = self.optimizer.begin(sent.params, local_state)
        return _Carry(sent.params, losses, zero.expand(2), zero, scale, candidate, state)

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        x, y, *weight = batch
        predictions = _predict_each(carry.w, x, loss.predict)
        each = _score(predictions, EXPERTS, y)
        weights = weight[0] if weight else torch.ones_like(each[0])
        losses = add_to_mean(carry.losses, batch, (each * weights).sum(1) / weights.sum())
        evidence = carry.evidence
        if carry.candidate:
            other = _predict_each(Params({**carry.w, **carry.candidate}), x, loss.predict)
            both = torch.stack([predictions[FULL], other[FULL]])
            mine, *others = _score(both, ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)), y)
            unit = _unit(carry.scale, torch.ones_like(carry.scale)) if y.is_floating_point() else 1.0
            rows = torch.stack([((one - mine) / unit).clamp(-MAX_ROW, MAX_ROW) for one in others])
            evidence = evidence + (rows * weights).sum(1)
        is_number = torch.ones_like(carry.is_number) if y.is_floating_point() else carry.is_number
        return carry._replace(losses=losses, evidence=evidence, is_number=is_number)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        (found, n), old, guard = carry.losses, local_state["losses"], sent.extra["guard"]
        memory, has_rows = MEMORY * (old["n"] > 0).to(found.dtype), n > 0
        mean = torch.where(has_rows, memory * old["mean"] + (1 - memory) * found, old["mean"])
        n = torch.where(has_rows, n, old["n"])
        is_number = (carry.is_number + guard["scale"]) > 0
        unit = torch.where(is_number, _unit(guard["scale"], mean.min()), 1.0)
        q = self._weigh(guard["prior"], n * mean / unit)
        scale = torch.where(has_rows, carry.is_number * (q * mean).sum(), guard["scale"])
        extra = {"guard": Params(change=REPORT * (q - guard["prior"]), scale=REPORT * scale)}
        if carry.candidate:
            evidence = carry.evidence.clamp(-MAX_EVIDENCE, MAX_EVIDENCE)
            extra[CANDIDATE] = Params(evidence=REPORT / MAX_EVIDENCE * evidence)
        w = set_guard(carry.w, self._mix(q))
        return Payload(w, extra), {"losses": Params(mean=mean, n=n), **self.optimizer.keep(carry.optimizer)}

    def _weigh(self, prior: Tensor, evidence: Tensor) -> Tensor:
        """Return the weights q (..., E) of the experts by their summed losses, which are in units of log likelihood."""
        return torch.softmax(prior.log() - evidence, -1)

    def _mix(self, q: Tensor) -> Tensor:
        """Return the weights (..., 6) of the predictions."""
        if self.guard == "shared":
            q = torch.zeros_like(q).index_fill(-1, torch.tensor(SHARED_ALONE, device=q.device), 1.0)
        elif self.guard == "equal":
            q = torch.full_like(q, 1 / len(EXPERTS))
        return (q[..., None] * q.new_tensor(EXPERTS)).sum(-2)  # @ under vmap would not be compiled

    def score_rows(self, w: Params, x: Tensor, y: Tensor, predict: Callable[[Params, Tensor], Tensor]) -> Tensor:
        return _score(_predict_each(w, x, predict), EXPERTS, y)

    def weigh_rows(self, sums: Tensor, others: Tensor, n: Tensor, *, is_number: bool) -> Params:
        unit = n.new_ones(())
        if is_number and len(others):
            unit = _unit(torch.zeros_like(unit), others.sum(0).min() / n.sum())
        prior = _weigh_alike(others)
        for _ in range(PRIOR_STEPS):
            prior = _average_prior(prior, self._weigh(prior, others / unit))
        return set_guard(Params(), self._mix(self._weigh(prior, sums / unit)))


def _predict_each(w: Params, x: Tensor, predict: Callable[[Params, Tensor], Tensor]) -> Tensor:
    """Return what each prediction of a `TwinModule` says of B rows: (6, B, outputs)."""
    return predict(set_guard(w, torch.eye(N_PREDICTORS, dtype=w[GUARD[0]].dtype, device=x.device)[:, None]), x)


def _score(predictions: Tensor, experts: Sequence[Sequence[float]], y: Tensor) -> Tensor:
    """Return the losses (E, B) of means of predictions (P, B, outputs), whose weights are `experts` (E, P).

    Several labels or numbers count by the mean of their losses.
    """
    weights = predictions.new_tensor(experts)
    if y.dim() > 1:
        return _score_several(predictions, weights, y)
    if y.is_floating_point():
        return (weights @ predictions.squeeze(-1) - y).square()
    right = predictions.gather(-1, y.expand(len(predictions), -1)[..., None]).squeeze(-1).exp()
    return -(weights @ right).clamp_min(MIN_PROBABILITY).log()


def _score_several(predictions: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    is_labels = y.dtype == torch.bool
    each = predictions.sigmoid() if is_labels else predictions
    mixed = (weights @ each.flatten(1)).view(-1, *y.shape)
    if not is_labels:
        return (mixed - y).square().mean(-1)
    right = torch.where(y, mixed, 1 - mixed)
    return -right.clamp_min(MIN_PROBABILITY).log().mean(-1)


def _unit(scale: Tensor, otherwise: Tensor) -> Tensor:
    """Return the squared error that counts as one unit of log likelihood: twice the mean error of the best experts."""
    return 2 * torch.where(scale > 0, scale, otherwise).clamp_min(SMALLEST_SQUARE)


def _weigh_alike(like: Tensor) -> Tensor:
    """Return the same weight for every expert (E,)."""
    return like.new_full((len(EXPERTS),), 1 / len(EXPERTS))


def _average_prior(prior: Tensor, q: Tensor) -> Tensor:
    """Return the new prior of the experts, from the weights q (K, E) of K clients."""
    mean = (q.sum(0) + _weigh_alike(q)) / (len(q) + 1)
    return MEMORY * prior + (1 - MEMORY) * mean


class AttuneState(TypedDict):
    """Models and velocities of G groups; of all clients, the group, what tells it, and weights; and the evidence.

    `prior` (E,) and `scale` are the mean weights of the experts, and the mean squared error where numbers are
    predicted. `for_group` (N, G) tells how well each group's model predicts a client's rows, `for_pair` (G, G) how well
    the models of two groups do together, and `n_rounds` which group's model goes to whom.
    """

    w: Params
    velocity: Params
    group: PerClient[Tensor]
    class_rows: PerClient[Tensor]
    n_uploads: PerClient[Tensor]
    p: PerClient[Tensor]
    for_group: PerClient[Tensor]
    for_pair: Tensor
    n_rounds: Tensor
    guard: Params


@dataclass(frozen=True)
class AttuneServer(Joinable[AttuneState], Discardable):
    """Server rule of Attune: one model for each group of clients whose classes look alike.

    `beta` is the option `server_momentum` of `attune`.
    """

    beta: float = 0.6
    likeness: float = 0.1
    compare: bool = True
    weighting: Weighting = "samples"

    traits = ServerTraits(AttuneState)

    def init(self, w0: Params, n_clients: int) -> AttuneState:
        w0 = Params(w0)  # so that copies are of groups, wherever those of clients are kept
        like = next(iter(w0.values()))
        rows = find_class_rows(w0)
        n_groups, device = min(MAX_GROUPS, n_clients), like.device
        return {
            "w": w0.copies(n_groups),
            "velocity": w0.zeros().copies(n_groups),
            "group": torch.zeros(n_clients, dtype=torch.int64, device=device),
            "class_rows": like.new_zeros((n_clients, *(() if rows is None else rows.shape))),
            "n_uploads": torch.zeros(n_clients, dtype=torch.int64, device=device),
            "p": torch.zeros(n_clients, dtype=torch.float64, device=device),
            "for_group": torch.zeros(n_clients, MAX_GROUPS, dtype=torch.float64, device=device),
            "for_pair": torch.zeros(MAX_GROUPS, MAX_GROUPS, dtype=torch.float64, device=device),
            "n_rounds": torch.zeros((), dtype=torch.int64, device=device),
            "guard": Params(prior=_weigh_alike(like), scale=like.new_zeros(())),
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
        extra = {"guard": state["guard"].repeat(len(ids))}
        if (candidates := self._choose_candidates(state, ids)) is not None:
            extra[CANDIDATE] = w.rows(candidates)
        return Broadcast(Payload(models, extra), mixing)

    def _choose_candidates(self, state: AttuneState, ids: Tensor) -> Tensor | None:
        """Choose another group for each client, one after the other in turn; None if there is one group only."""
        group = state["group"]
        present: Tensor = group.unique()  # type: ignore[no-untyped-call]
        if not self.compare or len(present) < 2:
            return None
        turn = (state["n_rounds"] + ids) % (len(present) - 1)
        return present[turn + (turn >= torch.searchsorted(present, group[ids])).long()]

    def aggregate(self, state: AttuneState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> AttuneState:
        updates = uploads.params - sent.params
        candidates, before = self._choose_candidates(state, ids), state["group"]
        state = self._find_groups(state, ids, updates)
        w, velocity = state["w"], state["velocity"]
        group = state["group"][ids]
        p = client_weights(n, self.weighting)
        moved: Tensor = group.unique()  # type: ignore[no-untyped-call]
        steps = []
        for g in moved.tolist():
            rows = (group == g).nonzero().flatten()
            mean = weighted_sum(p[rows] / p[rows].sum(), updates.rows(rows))
            steps.append(self.beta * velocity.rows(g) + mean)
        step = Params({k: torch.stack([one[k] for one in steps]) for k in w})
        new = w.rows(moved) + step
        state = change(
            state,
            w=w.map(lambda a, b: a.index_copy(0, moved, b), new),
            velocity=velocity.map(lambda a, b: a.index_copy(0, moved, b), step),
            p=torch.zeros_like(state["p"]).index_copy_(0, ids, p),
            n_rounds=state["n_rounds"] + 1,
            guard=self._average_guards(state["guard"], uploads.extra["guard"]),
        )
        if candidates is None or not torch.equal(before, state["group"]):
            return state  # the evidence is about other groups
        evidence = uploads.extra[CANDIDATE]["evidence"].double() * (MAX_EVIDENCE / REPORT)
        return self._merge_groups(self._move_clients(state, ids, candidates, evidence))

    @staticmethod
    def _average_guards(old: Params, reports: Params) -> Params:
        q = (old["prior"] + reports["change"] / REPORT).clamp(0, 1)
        known = reports["scale"] > 0  # clients without validation rows know none at first
        scale = (reports["scale"] / REPORT).clamp_min(0).sum() / known.sum().clamp_min(1)
        scale = torch.where(old["scale"] > 0, MEMORY * old["scale"] + (1 - MEMORY) * scale, scale)
        return Params(prior=_average_prior(old["prior"], q), scale=scale)

    @staticmethod
    def _move_clients(state: AttuneState, ids: Tensor, candidates: Tensor, evidence: Tensor) -> AttuneState:
        """Add the evidence (C, 2) about other groups to that of earlier rounds; move clients for which it is clear."""
        alone, both = evidence.unbind(1)
        group, for_group, for_pair = state["group"].clone(), state["for_group"].clone(), MEMORY * state["for_pair"]
        for_pair = for_pair.index_put((group[ids], candidates), both, accumulate=True)
        for_group[ids, candidates] = MEMORY * for_group[ids, candidates] + (1 - MEMORY) * alone
        least, best = for_group[ids].min(1)
        moving = ids[least < TO_MOVE]
        group[moving] = best[least < TO_MOVE]
        for_group[moving] = 0.0
        return change(state, group=group, for_group=for_group, for_pair=for_pair)

    @staticmethod
    def _merge_groups(state: AttuneState) -> AttuneState:
        """Merge pairs of groups whose models together predict the rows of both groups' clients better."""
        w, velocity, for_pair = state["w"], state["velocity"], state["for_pair"]
        group, for_group, for_pair = state["group"].clone(), state["for_group"].clone(), for_pair.clone()
        for a, b in for_pair.triu(1).nonzero().tolist():
            one, other = float(for_pair[a, b]), float(for_pair[b, a])
            sizes = [int((group == g).sum()) for g in (a, b)]
            if not (max(one, other) < 0 and one + other < TO_MERGE and all(sizes)):
                continue
            kept, gone = (a, b) if sizes[0] >= sizes[1] else (b, a)
            w, velocity = (_join_rows(v, kept, gone, min(sizes) / sum(sizes)) for v in (w, velocity))
            group[group == gone] = kept
            for_group[:, [a, b]] = 0.0
            for_pair[[a, b]] = for_pair[:, [a, b]] = 0.0
        return change(state, w=w, velocity=velocity, group=group, for_group=for_group, for_pair=for_pair)

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
        kept = 1.0 if torch.equal(group, state["group"]) else 0.0  # evidence about other groups is of no use
        return change(
            state,
            w=w,
            velocity=velocity,
            group=group,
            class_rows=sums,
            n_uploads=n_uploads,
            for_group=kept * state["for_group"],
            for_pair=kept * state["for_pair"],
        )

    def discard_uploads(self, state: AttuneState, ids: Tensor) -> AttuneState:
        """Forget the class rows and the evidence of clients `ids`, so that they form no groups."""
        rows, evidence = (state[key].index_fill(0, ids, 0.0) for key in ("class_rows", "for_group"))
        n_uploads = state["n_uploads"].index_fill(0, ids, 0)
        return change(state, class_rows=rows, for_group=evidence, n_uploads=n_uploads)

    def global_model(self, state: AttuneState) -> Params | None:
        """Return None: there is a model for every group."""
        return None

    def newcomer_model(self, state: AttuneState) -> Params:
        return state["w"].rows(int(state["group"].mode().values))

    def add_clients(self, state: AttuneState, n_new: int) -> AttuneState:
        group, w, velocity = state["group"], state["w"], state["velocity"]
        new = super().add_clients(state, n_new)
        largest = group.mode().values.expand(n_new)
        # There is room for more groups, which are empty at first.
        n_more = min(MAX_GROUPS, len(group) + n_new) - len(next(iter(w.values())))
        empty = self.newcomer_model(state).repeat(n_more)
        return change(
            new,
            group=torch.cat([group, largest]),
            w=concatenate([w, empty]),
            velocity=concatenate([velocity, empty.zeros()]),
        )


def _join_rows(stack: Params, kept: int, gone: int, share: float) -> Params:
    """Return the stack of models with a mean in place of model `kept`, in which model `gone` has a share."""
    mean = stack.rows(slice(kept, kept + 1)).map(
        lambda a, b: torch.lerp(a, b, share), stack.rows(slice(gone, gone + 1))
    )
    return stack.map(lambda old, new: torch.cat([old[:kept], new, old[kept + 1 :]]), mean)


@method(
    Family.PERSONAL_MODEL,
    "one model per group, with momentum",
    "SGD; weighs predictions of the shared model, an own head and intercept, and an own model",
    tune={"server_momentum": (0.0, 0.6, 0.9)},
)
def attune(
    *,
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.6,
    likeness: Annotated[float, Field(ge=-1, le=1)] = 0.1,
    compare_groups: bool = True,
    own_head: bool = True,
    class_shares: bool = True,
    guard: Guard = "losses",
    weighting: Weighting = "samples",
) -> Algorithm:
    """A shared model for every group of clients that are found to be alike; an own head, intercept and model for each.

    Source: this package, docs/algorithms/attune.md.

    Args:
        server_momentum: momentum of each group's model on the server; 0 for none.
        likeness: minimum likeness of the classes of clients that share a model, from -1 (all clients share one) to 1.
        compare_groups: whether clients receive other groups' models in turn, move to a group whose model predicts their
            validation rows better, and groups merge whose models do so together.
        own_head: whether each client trains a head of its own on the features of the shared model, and an intercept.
        class_shares: whether the shared model's predictions may use the client's class shares.
        guard: weights of the predictions: by `losses` on validation rows, `equal` for all experts, or the `shared`
            model alone.
        weighting: weights p_k in the mean update of a group: by training samples, or `uniform`.
    """
    return Algorithm(
        AttuneClient(guard),
        AttuneServer(server_momentum, likeness, compare_groups, weighting),
        personal=NamedParameters(("own", "guard")),
        network=TwinNetwork(1.0 if guard == "shared" else 0.5, class_shares, own_head),
        evaluation_point="received",
    )
