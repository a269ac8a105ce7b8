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
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..core.algorithm import Algorithm, ClientUpdate
from ..core.options import Fraction
from ..core.params import Params, choose
from ..core.payload import (
    Batch,
    Broadcast,
    Grad,
    LocalState,
    Loss,
    Payload,
    RoundContext,
    ServerState,
    Traffic,
    count_traffic,
)
from ..server.mixing import UploadStore
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    start: Params
    models: Params
    losses: Tensor
    seen: Tensor
    a: Tensor


@dataclass(frozen=True)
class FedFomoClient(ClientUpdate):
    """Move towards the candidates that are better on held-out data, in proportion to how much; then SGD.

    Source: FedFomo (Zhang et al., 2021), section 3. With theta what the client started its last local steps
    from, and M candidates theta_n, its own last model and those of others that the server rule `Peers` sends:
    a_n = (L(theta) - L(theta_n)) / (||theta_n - theta|| + 1e-5), w_n = max(a_n, 0) / sum_m max(a_m, 0),
    theta <- theta + sum_n w_n (theta_n - theta).

    Attributes:
        validation: share of the training samples that is held out for L; they are not trained on.
        fallback: where to go on if no candidate is better than theta: the client's `own` last model, or the
            `previous` theta.
        affinity: what is reported of the others: a_n as it is (`raw`), or divided by |sum_m a_m| (`normalised`).

    """

    validation: float = 0.2
    fallback: Literal["own", "previous"] = "own"
    affinity: Literal["raw", "normalised"] = "raw"

    @property
    def validation_share(self) -> float:
        """The samples that L is taken on."""
        return self.validation

    @property
    def is_ready_after_probe(self) -> bool:
        """The received model depends on the losses of the candidates."""
        return True

    @property
    def required_extras(self) -> dict[str, str]:
        """The others' models, and which they are."""
        return {"peers": "FedFomoServer", "numbers": "FedFomoServer"}

    def init_local_state(self, w0: Params) -> LocalState:
        """The model that local steps last started from, and the one that they ended with."""
        return {"previous": w0, "own": w0}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        """Line up theta and the candidates (M + 1, ...), with no losses yet."""
        own, peers = local_state["own"], sent.extra["peers"]
        others = len(sent.extra["numbers"]["peer"])
        models = local_state["previous"].map(lambda a, b: torch.stack([a, b]), own)
        for name, v in models.items():  # tensors that never leave a client are its own in every candidate
            more = peers[name] if name in peers else own[name].expand(others, *own[name].shape)
            models[name] = torch.cat([v, more])
        zeros = context.n_steps.new_zeros(2 + others)
        return _Carry(own, own, models, zeros, context.n_steps * 0, zeros[1:])

    def probe_passes(self, local_state: LocalState) -> Tensor:
        """One pass over the held-out samples."""
        return torch.ones(())

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        """The losses over the samples seen so far, and the model that they ask for."""
        x, _, *weight = batch
        more = weight[0].sum() if weight else torch.full_like(carry.seen, len(x))
        seen = carry.seen + more
        # One by one: not every model can run as a batch of models.
        each = torch.stack([loss(carry.models.rows(i), batch) for i in range(len(carry.losses))])
        losses = carry.losses + (each - carry.losses) * (more / seen)
        a = compute_affinity(carry.models, losses)
        start = self._mixed(carry.models, a)
        return carry._replace(w=start, start=start, losses=losses, seen=seen, a=a)

    def _mixed(self, models: Params, a: Tensor) -> Params:
        previous, own = models.rows(0), models.rows(1)
        w = normalize_affinity(a)
        moved = models.map(lambda v: v[0] + torch.tensordot(w.to(v.dtype), v[1:] - v[:1], 1))
        return choose(w.sum() > 0, moved, own if self.fallback == "own" else previous)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        """One gradient step."""
        return carry._replace(w=carry.w - context.lr * grad(carry.w, batch))

    def finish(
        self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext
    ) -> tuple[Payload, LocalState]:
        """Upload the trained model and how much each of the others helps."""
        a = carry.a
        if self.affinity == "normalised":
            total = a.sum().abs()
            a = a / torch.where(total > 0, total, 1.0)
        upload = Payload(carry.w, {"affinity": Params(a=a[1:])})
        return upload, {"previous": carry.start, "own": carry.w}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """The own last model: what it is moved towards is known only after a look at the held-out data."""
        return local_state["own"]


def compute_affinity(models: Params, losses: Tensor) -> Tensor:
    """a_n (M,) of candidates models[1:] against models[0]; 0 for one that is the same, whatever rounding says."""
    squares = [(v[1:] - v[:1]).reshape(len(v) - 1, -1).square().sum(1) for v in models.values()]
    distance = torch.stack(squares).sum(0).sqrt()
    a = (losses[:1] - losses[1:]) / (distance + 1e-5)
    return torch.where(distance > 0, a, 0.0)


def normalize_affinity(a: Tensor) -> Tensor:
    """w_n (M,): the positive part of a (M,), scaled to sum to 1; all 0 if there is none."""
    positive = a.clamp_min(0)
    total = positive.sum()
    return positive / torch.where(total > 0, total, 1.0)


@dataclass(frozen=True)
class FedFomoServer(UploadStore):
    """Client i is sent the last uploads of `models` - 1 others; those that helped it most before, or any.

    Source: FedFomo (Zhang et al., 2021), section 3. With probability epsilon they are drawn at random, otherwise
    they are those of the largest affinity P[i, :], ties broken at random; epsilon is epsilon - epsilon_decay t after
    t rounds, until it is 0. A client reports how much each of them helps, which is added to P. Its own last upload
    is one of its `models` candidates too; it is in `Payload.params` and does not travel, as the client has it.
    """

    models: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """The bank, whose models all can be sent from the start, the affinities P (N, N), and what draws."""
        state = super().init(w0, n_clients)
        everybody = torch.ones_like(cast(Tensor, state["in_pool"]))
        return {
            **state,
            "in_pool": everybody,
            "P": torch.zeros(n_clients, n_clients, dtype=torch.float64, device=everybody.device),
            "seed": torch.randint(1 << 62, ()),
            "round": torch.zeros((), dtype=torch.int64),
        }

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """The own last upload, and those of others with their numbers (R, M - 1)."""
        theta, chosen = cast(Params, state["theta"]), self._chosen(state, ids)
        extra = {"peers": theta.rows(chosen), "numbers": Params(peer=chosen)}
        return Broadcast(Payload(theta.rows(ids), extra))

    def _chosen(self, state: ServerState, ids: Tensor) -> Tensor:
        """Whose models (R, M - 1) clients `ids` are sent; depends on the state and the client alone."""
        seed, t = int(cast(Tensor, state["seed"])), int(cast(Tensor, state["round"]))
        members = cast(Tensor, state["in_pool"]).nonzero().flatten().cpu().numpy()
        most = min(self.models, len(members)) - 1
        # What differs by less is taken for equal, so that rounding decides nothing.
        affinity = np.round(cast(Tensor, state["P"])[ids].cpu().numpy(), 6)
        chosen = []
        for row, i in enumerate(ids.tolist()):
            rng = np.random.default_rng([seed, t, i])
            others = rng.permutation(members[members != i])
            if rng.random() >= self.epsilon - self.epsilon_decay * t:
                others = others[np.argsort(-affinity[row, others], kind="stable")]
            chosen.append(others[:most])
        return torch.from_numpy(np.stack(chosen)).to(ids.device)

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Keep what came back, and add what clients found to their affinities (written in place)."""
        peers, found = sent.extra["numbers"]["peer"], received.extra["affinity"]["a"]
        P = cast(Tensor, state["P"])
        P.index_put_((ids[:, None].expand_as(peers), peers), found.to(P.dtype), accumulate=True)
        return {**super().aggregate(state, ids, sent, received, n), "P": P, "round": state["round"] + 1}

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """What is sent without the own model."""
        return sent.traffic() - count_traffic(sent.params)

    def add_clients(self, state: ServerState, n: int) -> ServerState:
        """The state with `n` more clients, who know nothing yet of whom to ask."""
        P = cast(Tensor, state["P"])
        return {**super().add_clients(state, n), "P": torch.nn.functional.pad(P, (0, n, 0, n))}


@method(Family.MIXTURE, "models of other clients", "moves to the models that do better on held-out data; SGD")
def fedfomo(
    *,
    models: Annotated[int, Field(ge=2, le=1_000_000)] = 5,
    epsilon: Fraction = 0.3,
    epsilon_decay: Fraction = 0.05,
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    fallback: Literal["own", "previous"] = "own",
    affinity: Literal["raw", "normalised"] = "raw",
) -> Algorithm:
    """Clients are sent models of others and take what is better than theirs on held-out data."""
    return Algorithm(
        FedFomoClient(validation, fallback, affinity),
        FedFomoServer(models, epsilon, epsilon_decay),
        headline="received",
    )
