"""FedPAC.

    @inproceedings{xu2023personalized,
      author = {Xu, Jian and Tong, Xinyi and Huang, Shao-Lun},
      title = {Personalized Federated Learning with Feature Alignment and Classifier Collaboration},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2023},
      eprint = {2306.11867},
      archiveprefix = {arXiv}
    }

Algorithm 1, with the features f(x) of the body w, which the head gets, p_ij the share of class j at client i, n_i its
samples, and the centroid c_j of each class:

    client   h_ij <- p_ij mean f(x | j),  V_i <- (mean ||f(x)||^2 - sum_j ||h_ij||^2) / n_i,  with the received w
             head_epochs times the round's work: SGD of the head on CE
             base_epochs times the round's work: SGD of the body on CE + lam R, R = mean ||f(x) - c_y||^2 / (features)
             c_ij <- the mean of f over the samples of class j in the steps of the body
    server   w <- sum_i n_i w_i / sum_i n_i,  c_j <- sum_i n_ij c_ij / sum_i n_ij, over the clients i of the cohort
             head_i <- sum_k alpha_ik head_k, where alpha_i minimizes, over alpha >= 0 with sum_k alpha_k = 1,
             sum_k alpha_k^2 V_k + sum_j ||h_ij - sum_k alpha_k h_kj||^2
    used as  (w_i, head_i) after local training
"""

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from ..client import Optimizing
from ..core.algorithm import (
    Algorithm,
    Finished,
    Joinable,
    LocalPlan,
    Measurable,
    PerClient,
    Probe,
    Probing,
    ServerTraits,
    StepChanges,
    StepMeasuring,
    change,
)
from ..core.effect import ONE_MIXTURE, OWN_MODEL, Effect, Mechanism, measure_mixing
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.options import Count, NonNegative
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Broadcast, Grad, LocalState, Loss, MixingMatrices, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import Weighting, client_weights, weighted_sum
from ..server.mixing import BLOCK_CLIENTS
from .prototypes import READERS, divide, encode_classes, make_readers, measure_distance, read_features, select_head
from .table import Family, method

TIE = 1e-9
"""Smallest eigenvalue of a quadratic programme, relative to their mean: alike clients have equal weights."""


class CentroidModule(MethodModule):
    """Predicts head(body(x)); trains near the centroids, and lets client rules read features: see `read_features`.

    The last column of `sums` (C, f + 1) reads the squared norms of the features of each class.
    """

    has_batch_loss = True

    def __init__(self, body: nn.Module, head: nn.Linear, lam: float) -> None:
        super().__init__()
        self.body, self.head, self.lam = body, head, lam
        self.centroids, self.known = make_readers(head)  # of the same shapes
        sums, self.counts = make_readers(head)
        self.sums = nn.Parameter(torch.cat([sums.detach(), sums.detach()[:, :1]], 1))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits (B, C); in training also the features (B, f), and the parameters beside the model."""
        f = self.body(x)
        logits: Tensor = self.head(f)
        return (logits, f, self.centroids, self.known, self.sums, self.counts) if self.training else logits

    def objective(self, output: tuple[Tensor, ...], batch: Batch, loss: LossFunction) -> Tensor:
        logits, f, centroids, known, sums, counts = output
        one_hot = encode_classes(batch[1], counts)
        pull = measure_distance(f, one_hot, centroids.detach(), known.detach(), "samples")
        values = torch.cat([f, f.square().sum(1, keepdim=True)], 1)
        return loss(logits, batch) + self.lam * pull + read_features(values, one_hot, sums, counts)


@dataclass(frozen=True)
class CentroidNetwork(Network):
    """Adds the centroids, and the parameters by which clients read features."""

    lam: float

    class_need = "FedPAC has a centroid of each class"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return CentroidModule(*split_head(model, x), self.lam)


class _Carry(NamedTuple):
    w: Params
    probed: Params
    n_probed: Tensor
    read: Params
    t: Tensor
    optimizer: LocalState


@dataclass(frozen=True)
class AlignedClient(Optimizing, Probing, StepMeasuring):
    """Client rule of FedPAC: reads statistics of its features, and trains the head, then the body near the centroids.

    `head` and `base` are repetitions of the round's local work on each; the other part stays exactly the same.
    """

    head: int = 1
    base: int = 1

    trained_parts = ("body.", "head.")

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(passes=self.head + self.base, probe=Probe(), extras={"centroids": "HeadCombination"})

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        centroids = sent.extra["centroids"]
        w = Params({**sent.params, "centroids": centroids["means"], "known": centroids["has_one"]})
        nothing, zero = w.only(READERS).zeros(), torch.zeros_like(context.n_steps)
        return _Carry(w, nothing, zero, nothing, zero, self.optimizer.begin(self.select_trained(w), local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        """Read the features of the received body."""
        read = grad(carry.w, batch, statistics=False).only(READERS)
        return carry._replace(probed=carry.probed + read, n_probed=carry.n_probed + len(batch[1]))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        w, g = self.select_trained(carry.w), grad(carry.w, batch)
        trains_head = self._trains_head(carry, context)
        moves = _select_part(w, trains_head)
        new, state = self.optimizer.step(w, g.only(w), carry.optimizer, context.lr)
        new = moves.map(torch.where, new, w)
        # The moments of the frozen part stay, too; a count of steps is of both parts.
        optimizer = {
            k: moves.map(torch.where, v, carry.optimizer[k]) if v.keys() == w.keys() else v for k, v in state.items()
        }
        read = carry.read.map(lambda a, b: torch.where(trains_head, a, a + b), g.only(READERS))
        return carry._replace(w=Params({**carry.w, **new}), read=read, t=carry.t + 1, optimizer=optimizer)

    def _trains_head(self, carry: _Carry, context: RoundContext) -> Tensor:
        return carry.t * self.plan.passes < context.n_steps * self.head

    mechanisms = (Mechanism("steps", "steps without the distance to the centroids", "one without aligned features"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        without = Params({**carry.w, "known": torch.zeros_like(carry.w["known"])})
        moves = _select_part(self.select_trained(carry.w), self._trains_head(carry, context))
        pulled, plain = (_mask(grad(w, batch, statistics=False).only(moves), moves) for w in (carry.w, without))
        return ((squared_norm(pulled - plain), squared_norm(plain)),)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        h, V = compute_statistics(carry.probed["sums"], carry.probed["counts"], carry.n_probed)
        sums, counts = carry.read["sums"][:, :-1], carry.read["counts"]
        features = Params(means=divide(sums, counts), shares=divide(counts[:, None], counts.sum())[:, 0])
        upload = Payload(carry.w, {"features": features, "statistics": Params(h=h, V=V)})
        return upload, {**local_state, **self.optimizer.keep(carry.optimizer)}


def compute_statistics(sums: Tensor, counts: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return h (C, f) and V from what a pass over n rows read: sums (C, f + 1) and counts (C,), times one factor.

    The factor is not always `READING`: a limit of the gradient's norm shrinks both.
    """
    mean = divide(sums, counts.sum())  # over all rows
    h, square = mean[:, :-1], mean[:, -1].sum()
    return h, (square - h.square().sum()).clamp_min(0) / n.clamp_min(1)


def _select_part(w: Params, is_head: Tensor) -> Params:
    """Return for each tensor of a model whether it is of the head, or of the body, as `is_head` tells."""
    return Params({k: is_head if k.startswith("head.") else ~is_head for k in w})


def _mask(g: Params, moves: Params) -> Params:
    return moves.map(lambda move, a: torch.where(move, a, 0.0), g)


class CombinationState(TypedDict):
    """The mean model and the centroids; each client's head; the last cohort, and its weights of heads.

    The two last entries are for reports. Their size changes only when clients join: -1 is no client. Cohorts above
    `BLOCK_CLIENTS` have no entry.
    """

    w: Params
    centroids: Params
    heads: PerClient[Params]
    has_head: PerClient[Tensor]
    cohort: Tensor
    alpha: Tensor


ONE_HEAD = Mechanism("weights", "one combination of heads for all clients", "one with one head for all")
OWN_HEAD = Mechanism("weights", "the client's own head alone", "one with personal heads")


@dataclass(frozen=True)
class HeadCombination(Joinable[CombinationState], Measurable):
    """Server rule of FedPAC: averages bodies and centroids, and combines heads for each client of the cohort.

    A client that never uploaded receives the average of heads.
    """

    weighting: Weighting = "samples"

    traits = ServerTraits(CombinationState)

    def init(self, w0: Params, n_clients: int) -> CombinationState:
        like, size = w0["head.weight"], min(n_clients, BLOCK_CLIENTS)
        return {
            "w": w0,
            "centroids": Params(means=torch.zeros_like(like), has_one=torch.zeros_like(like[:, 0])),
            "heads": select_head(w0).copies(n_clients),
            "has_head": torch.zeros(n_clients, dtype=torch.bool, device=like.device),
            "cohort": torch.full((size,), -1, device=like.device),
            "alpha": torch.zeros(size, size, dtype=torch.float64, device=like.device),
        }

    def broadcast(self, state: CombinationState, ids: Tensor) -> Broadcast:
        w, has_head, cohort = state["w"].repeat(len(ids)), state["has_head"][ids], state["cohort"]
        cohort = cohort[cohort >= 0]
        heads = Params()
        for name, own in state["heads"].rows(ids).items():
            heads[name] = torch.where(has_head.view(-1, *[1] * (own.dim() - 1)), own, w[name])
        payload = Payload(Params({**w, **heads}), {"centroids": state["centroids"].repeat(len(ids))})
        if not len(cohort) or not torch.isin(ids, cohort).all():
            return Broadcast(payload)
        alpha = state["alpha"][torch.searchsorted(cohort, ids), : len(cohort)]
        return Broadcast(payload, MixingMatrices(ids, cohort, {"head": alpha}))

    def aggregate(
        self, state: CombinationState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> CombinationState:
        p, features, statistics = (
            client_weights(n, self.weighting),
            uploads.extra["features"],
            uploads.extra["statistics"],
        )
        shares = features["shares"].clamp_min(0)  # privacy may add noise
        shares = p[:, None].to(shares) * shares
        total, old = shares.sum(0), state["centroids"]
        centroids = divide((shares[:, :, None] * features["means"]).sum(0), total)
        alpha = combine_heads(statistics["h"].flatten(1).double(), statistics["V"].clamp_min(0).double())
        heads = select_head(uploads.params).map(lambda a: torch.tensordot(alpha.to(a), a, 1))
        state["heads"].put_rows(ids, heads)
        state["has_head"].index_fill_(0, ids, True)
        state["cohort"].fill_(-1)
        if len(ids) <= len(state["cohort"]):
            state["cohort"][: len(ids)] = ids
            state["alpha"][: len(ids), : len(ids)] = alpha
        return change(
            state,
            w=weighted_sum(p, uploads.params),
            centroids=Params(
                means=torch.where((total > 0)[:, None], centroids, old["means"]),
                has_one=torch.where(total > 0, 1.0, old["has_one"]),
            ),
        )

    def add_clients(self, state: CombinationState, n_new: int) -> CombinationState:
        new, n = super().add_clients(state, n_new), len(state["cohort"])
        more = min(len(new["has_head"]), BLOCK_CLIENTS) - n
        return change(
            new, cohort=pad(state["cohort"], (0, more), value=-1), alpha=pad(state["alpha"], (0, more, 0, more))
        )

    def measure_effects(self, state: CombinationState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the distance of the weights from equal ones, and from the own head alone."""
        names = {ONE_MIXTURE: ONE_HEAD, OWN_MODEL: OWN_HEAD}
        return tuple(effect._replace(mechanism=names[effect.mechanism]) for effect in measure_mixing(mixing))


def combine_heads(h: Tensor, V: Tensor) -> Tensor:
    """Return alpha (K, K) from the statistics h (K, P) and V (K,) of K clients; see the module.

    Row i minimizes alpha^T Q_i alpha, Q_i = diag(V) + D_i D_i^T, where row k of D_i is h_i - h_k. Without the sum of 1
    but with the penalty (1 - sum alpha)^2, the minimum is that one times a number: non-negative least squares.
    """
    variances, products = np.diag(V.cpu().numpy()), (h @ h.T).cpu().numpy()
    rows = [_minimize(variances + products[i, i] - own - own[:, None] + products) for i, own in enumerate(products)]
    return torch.from_numpy(np.stack(rows)).to(h)


def _minimize(Q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return alpha >= 0 (K,) of sum 1 that minimizes alpha^T Q alpha."""
    from scipy.optimize import nnls  # its import takes a third of a second, for all methods

    values, vectors = np.linalg.eigh(Q / max(np.trace(Q) / len(Q), np.finfo(float).tiny))
    root = np.sqrt(values.clip(TIE))[:, None] * vectors.T
    alpha, _ = nnls(np.vstack([root, np.ones(len(Q))]), np.append(np.zeros(len(Q)), 1.0))
    result: NDArray[np.float64] = alpha / alpha.sum()
    return result


@method(
    Family.PERSONAL_LAYERS,
    "one average of bodies, and a combination of heads for each client",
    "SGD on the head, then on the body; draws features to the mean features of each class",
    tune={"lam": (0.1, 1.0, 10.0)},
)
def fedpac(
    *, lam: NonNegative = 1.0, head_epochs: Count = 1, base_epochs: Count = 1, weighting: Weighting = "samples"
) -> Algorithm:
    """A shared body with aligned features, and for each client the combination of heads that suits its features.

    Source: Xu, Tong and Huang (2023), Algorithm 1.

    Args:
        lam: weight lambda of the distance to the received centroids; 0 aligns no features.
        head_epochs: repetitions of the round's local work (its steps or epochs) on the head, with the body frozen.
        base_epochs: repetitions of the round's local work on the body, with the head frozen.
        weighting: weights of the clients in the averages of bodies and centroids: by their `samples`, or `uniform`.
    """
    return Algorithm(
        AlignedClient(head_epochs, base_epochs),
        HeadCombination(weighting),
        personal=NamedParameters(("centroids", "known", *READERS)),
        network=CentroidNetwork(lam),
        notes=("fedpac: of a class with one row, a client sends the features of that row",),
    )
