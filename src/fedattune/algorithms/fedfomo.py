"""FedFomo.

    @inproceedings{zhang2021personalized,
      author = {Zhang, Michael and Sapra, Karan and Fidler, Sanja and Yeung, Serena and Alvarez, Jose M.},
      title = {Personalized Federated Learning with First Order Model Optimization},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2021},
      eprint = {2012.08565},
      archiveprefix = {arXiv}
    }

Section 3:

    server   sends client i the last uploads theta_n of `models` - 1 other clients: with probability epsilon any,
             else the clients with the largest P[i, n]; epsilon falls by epsilon_decay in every round
    client   a_n = (L_i(theta_i) - L_i(theta_n)) / (||theta_n - theta_i|| + 1e-5) on held-out data,
             w_n = max(a_n, 0) / sum_m max(a_m, 0),  theta_i <- theta_i + sum_n w_n (theta_n - theta_i), then SGD
    server   P[i, n] <- P[i, n] + a_n
    used as  theta_i before SGD

The theta_i on the right is the start of client i's last SGD; the end of this SGD is one of the candidates theta_n.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..client import Optimizing, RunningMean, add_to_mean, score_models
from ..core.algorithm import (
    Algorithm,
    Finished,
    LocalPlan,
    Probe,
    Probing,
    StepChanges,
    StepMeasuring,
    Substituting,
    TrafficCounting,
    change,
)
from ..core.effect import Mechanism
from ..core.options import Fraction
from ..core.params import Params, choose, squared_norm
from ..core.payload import Batch, Broadcast, Grad, LocalState, Loss, Payload, RoundContext, Traffic, count_traffic
from ..server.mixing import StoreState, UploadStore
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    start: Params
    models: Params
    losses: RunningMean[Tensor]
    a: Tensor
    optimizer: LocalState


@dataclass(frozen=True)
class FedFomoClient(Optimizing, Probing, Substituting, StepMeasuring):
    """Client rule of FedFomo: moves towards candidates in proportion to their gain on held-out data; then SGD.

    theta is the start of the client's last SGD. The candidates are the client's own last model and the models that
    `FedFomoServer` sends. Options: see `fedfomo`.
    """

    validation: float = 0.2
    fallback: Literal["own", "previous"] = "own"
    affinity: Literal["raw", "normalised"] = "raw"

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(
            probe=Probe("held_out", self.validation, makes_received_model=True),
            extras={"peers": "FedFomoServer", "numbers": "FedFomoServer"},
        )

    def init_local_state(self, w0: Params) -> LocalState:
        return {"previous": w0, "own": w0, **self.optimizer.init_local_state(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        own, peers = local_state["own"], sent.extra["peers"]
        others = len(sent.extra["numbers"]["peer"])
        models = local_state["previous"].map(lambda a, b: torch.stack([a, b]), own)
        for name, v in models.items():  # personal tensors are the client's own in every candidate
            candidates = peers[name] if name in peers else own[name].expand(others, *own[name].shape)
            models[name] = torch.cat([v, candidates])
        zeros = context.n_steps.new_zeros(2 + others)
        losses, state = RunningMean(zeros, context.n_steps * 0), self.optimizer.begin(own, local_state)
        return _Carry(own, own, models, losses, zeros[1:], state)

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        each = score_models(carry.models, len(carry.losses.value), batch, loss)
        losses = add_to_mean(carry.losses, batch, each)
        a = compute_affinity(carry.models, losses.value)
        start = self._mixed(carry.models, a)
        return carry._replace(w=start, start=start, losses=losses, a=a)

    def _mixed(self, models: Params, a: Tensor) -> Params:
        previous, own = models.rows(0), models.rows(1)
        w = normalize_affinity(a)
        mixture = models.map(lambda v: v[0] + torch.tensordot(w.to(v.dtype), v[1:] - v[:1], 1))
        return choose(w.sum() > 0, mixture, own if self.fallback == "own" else previous)

    mechanisms = (Mechanism("starts", "the client's own last model", "training alone"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        own = carry.models.rows(1)
        apart = carry.models.map(lambda a, b: a[2:] - b, own)
        return (
            (
                squared_norm(carry.start - own),
                (squared_norm(apart) / max(1, len(carry.losses.value) - 2)).clamp_min(1e-12),
            ),
        )

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        a = carry.a
        if self.affinity == "normalised":
            total = a.sum().abs()
            a = a / torch.where(total > 0, total, 1.0)
        upload = Payload(carry.w, {"affinity": Params(a=a[1:])})
        return upload, {"previous": carry.start, "own": carry.w, **self.optimizer.keep(carry.optimizer)}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """Return the own last model; only the held-out data tell the next start."""
        return local_state["own"]

    def substitute(self, sent: Payload, own: Params) -> Payload:
        copies = sent.extra["peers"].map(lambda peers, mine: mine.expand(peers.shape), own.only(sent.extra["peers"]))
        return Payload(own, {**sent.extra, "peers": copies})


def compute_affinity(models: Params, losses: Tensor) -> Tensor:
    """Return a_n (M,) of the candidates models[1:] against models[0]; exactly 0 for an equal model."""
    squares = [(v[1:] - v[:1]).reshape(len(v) - 1, -1).square().sum(1) for v in models.values()]
    distance = torch.stack(squares).sum(0).sqrt()
    a = (losses[:1] - losses[1:]) / (distance + 1e-5)
    return torch.where(distance > 0, a, 0.0)


def normalize_affinity(a: Tensor) -> Tensor:
    """Return w_n (M,): the positive part of `a` (M,), scaled to sum to 1; all 0 if no entry is positive."""
    positive = a.clamp_min(0)
    total = positive.sum()
    return positive / torch.where(total > 0, total, 1.0)


class FedFomoState(StoreState):
    """The store, the affinities P (N, N), the seed of the random choices, and a count of rounds."""

    P: Tensor
    seed: Tensor
    round: Tensor


@dataclass(frozen=True)
class FedFomoServer(UploadStore[FedFomoState], TrafficCounting):
    """Server rule of FedFomo: sends each client the last uploads of `models` - 1 others.

    With probability epsilon - epsilon_decay t after t rounds, the others are drawn at random. Else they have the
    largest affinity P[i, :]; ties are broken at random. Clients report affinities, which are added to P. The client's
    own last upload is a candidate too; it is in `Payload.params` and does not travel.
    """

    models: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05

    def init(self, w0: Params, n_clients: int) -> FedFomoState:
        state = super().init(w0, n_clients)
        everybody = torch.ones_like(state["in_pool"])
        return change(
            state,
            in_pool=everybody,
            P=torch.zeros(n_clients, n_clients, dtype=torch.float64, device=everybody.device),
            seed=torch.randint(1 << 62, ()),
            round=torch.zeros((), dtype=torch.int64),
        )

    def broadcast(self, state: FedFomoState, ids: Tensor) -> Broadcast:
        theta, peers = state["theta"], self._choose_peers(state, ids)
        extra = {"peers": theta.rows(peers), "numbers": Params(peer=peers)}
        return Broadcast(Payload(theta.rows(ids), extra))

    def _choose_peers(self, state: FedFomoState, ids: Tensor) -> Tensor:
        """Choose the others (R, M - 1) for clients `ids`, from the state and the client alone."""
        seed, t = int(state["seed"]), int(state["round"])
        members = state["in_pool"].nonzero().flatten().cpu().numpy()
        max_peers = min(self.models, len(members)) - 1
        # Rounded, so that rounding errors do not break ties.
        affinity = np.round(state["P"][ids].cpu().numpy(), 6)
        peers = []
        for row, i in enumerate(ids.tolist()):
            rng = np.random.default_rng([seed, t, i])
            others = rng.permutation(members[members != i])
            if rng.random() >= self.epsilon - self.epsilon_decay * t:
                others = others[np.argsort(-affinity[row, others], kind="stable")]
            peers.append(others[:max_peers])
        return torch.from_numpy(np.stack(peers)).to(ids.device)

    def aggregate(self, state: FedFomoState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> FedFomoState:
        peers, affinity = sent.extra["numbers"]["peer"], uploads.extra["affinity"]["a"]
        P = state["P"]
        P.index_put_((ids[:, None].expand_as(peers), peers), affinity.to(P.dtype), accumulate=True)
        return change(super().aggregate(state, ids, sent, uploads, n), P=P, round=state["round"] + 1)

    def bytes_down(self, state: FedFomoState, ids: Tensor, sent: Payload) -> Traffic:
        return sent.traffic() - count_traffic(sent.params)

    def add_clients(self, state: FedFomoState, n_new: int) -> FedFomoState:
        P = state["P"]
        P = torch.nn.functional.pad(P, (0, n_new, 0, n_new))
        return change(super().add_clients(state, n_new), P=P)


@method(
    Family.MIXTURE,
    "models of other clients",
    "moves to the models that do better on held-out data; SGD",
    tune={"models": (5, 10), "epsilon": (0.1, 0.3)},
)
def fedfomo(
    *,
    models: Annotated[int, Field(ge=2, le=1_000_000)] = 5,
    epsilon: Fraction = 0.3,
    epsilon_decay: Fraction = 0.05,
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    fallback: Literal["own", "previous"] = "own",
    affinity: Literal["raw", "normalised"] = "raw",
) -> Algorithm:
    """Clients receive models of others and move to the models that do better on held-out data.

    Source: Zhang et al. (2021), section 3.

    Args:
        models: number M of candidates; one candidate is the client's own last model, which does not travel.
        epsilon: probability, in the first round, that a client receives random models instead of the best by P[i, n].
        epsilon_decay: decrease of epsilon per round.
        validation: share of the client's training samples for the losses L_i; SGD does not use these samples.
        fallback: start of SGD if no candidate has a positive a_n: the client's `own` last model, or the `previous`
            theta_i, as in the paper's formula and the authors' code.
        affinity: addition to P[i, n]: a_n (`raw`), or a_n / |sum_m a_m| (`normalised`), as in the paper's code.
    """
    return Algorithm(
        FedFomoClient(validation, fallback, affinity),
        FedFomoServer(models, epsilon, epsilon_decay),
        evaluation_point="received",
    )
