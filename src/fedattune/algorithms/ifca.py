"""IFCA, the iterative federated clustering algorithm.

    @inproceedings{ghosh2020efficient,
      author = {Ghosh, Avishek and Chung, Jichan and Yin, Dong and Ramchandran, Kannan},
      title = {An Efficient Framework for Clustered Federated Learning},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2020},
      eprint = {2006.04088},
      archiveprefix = {arXiv}
    }

Algorithm 1, with model averaging (option II):

    server   sends the K models theta_j
    client   j_i = argmin_j F_i(theta_j), the mean loss over its training samples;  theta~_i by SGD from theta_{j_i}
    server   theta_j <- mean of theta~_i over the clients of the cohort with j_i = j; without any, theta_j stays
    used as  theta_{j_i} before SGD
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypedDict

import torch
from pydantic import Field
from torch import Tensor

from ..client import Optimizing, RunningMean, add_to_mean, score_models
from ..core.algorithm import (
    Algorithm,
    Branching,
    Finished,
    Joinable,
    LocalPlan,
    Measurable,
    PerClient,
    Probe,
    Probing,
    ServerTraits,
    Substituting,
    TrafficCounting,
    change,
)
from ..core.effect import Effect, measure_mixing
from ..core.params import Params
from ..core.payload import (
    Batch,
    Broadcast,
    Grad,
    LocalState,
    Loss,
    MixingMatrices,
    Payload,
    RoundContext,
    Traffic,
    count_traffic,
)
from ..server.average import Weighting, client_weights
from ..server.products import flatten
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    models: Params
    losses: RunningMean[Tensor]
    optimizer: LocalState


@dataclass(frozen=True)
class IFCAClient(Optimizing, Probing, Substituting):
    """Client rule of IFCA: score the K models on the training samples, train the best one, and report its number."""

    plan = LocalPlan(probe=Probe(makes_received_model=True), extras={"models": "IFCAServer"})

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        """Stack the K models (K, ...); personal tensors are the client's own in each of them."""
        models, k = sent.extra["models"], len(next(iter(sent.extra["models"].values())))
        whole = sent.params.map(lambda v: v.expand(k, *v.shape))
        zeros = context.n_steps.new_zeros(k)
        state = self.optimizer.begin(sent.params, local_state)
        return _Carry(sent.params, Params({**whole, **models}), RunningMean(zeros, context.n_steps * 0), state)

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        each = score_models(carry.models, len(carry.losses.value), batch, loss)
        losses = add_to_mean(carry.losses, batch, each)
        best = choose_best(losses.value)
        w = carry.models.map(lambda v: torch.tensordot(best.to(v.dtype), v, 1))
        return carry._replace(w=w, losses=losses)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        cluster = Params(best=choose_best(carry.losses.value))
        return Payload(carry.w, {"cluster": cluster}), self.optimizer.keep(carry.optimizer)

    def substitute(self, sent: Payload, own: Params) -> Payload:
        """Put the own model in the place of the model of the client's cluster, so that the client stays in it."""
        models = sent.extra["models"]
        same = models.map(lambda v, chosen: flatten(v == chosen).all(1), sent.params.only(models))
        is_own = torch.stack(list(same.values())).all(0) if same else torch.ones(1, dtype=torch.bool)

        def put(v: Tensor, mine: Tensor) -> Tensor:
            return torch.where(is_own.view(-1, *[1] * mine.dim()), mine, v)

        return Payload(own, {"models": models.map(put, own.only(models))})


def choose_best(losses: Tensor) -> Tensor:
    """Return (K,) 1 for the lowest of K losses, the first of equal ones, and 0 for all others."""
    return (torch.arange(len(losses), device=losses.device) == losses.argmin()).to(losses.dtype)


class IFCAState(TypedDict):
    """The K models (K, ...), the last choice (N,) of each client, and the weights (N,) of the last cohort."""

    models: Params
    cluster: PerClient[Tensor]
    p: PerClient[Tensor]


@dataclass(frozen=True)
class IFCAServer(Joinable[IFCAState], Branching, Measurable, TrafficCounting):
    """Server rule of IFCA: keeps and sends K models, and averages the uploads of each cluster into its model.

    The first model is the initial model. Equal models would never separate, so noise is added to the others, which keep
    the scale of the first: a larger model would have a larger loss everywhere, and nobody would choose it. Options: see
    `ifca`.
    """

    clusters: int = 2
    spread: float = 1.0
    weighting: Weighting = "uniform"

    traits = ServerTraits(IFCAState)

    def init(self, w0: Params, n_clients: int) -> IFCAState:
        def draw(v: Tensor) -> Tensor:
            noise = torch.randn(self.clusters - 1, *v.shape, dtype=torch.float64).to(v)
            others = v + self.spread * v.square().mean().sqrt() * noise
            return torch.cat([v[None], others / (1 + self.spread**2) ** 0.5])

        return {
            "models": w0.map(draw),
            "cluster": torch.zeros(n_clients, dtype=torch.int64),
            "p": torch.zeros(n_clients, dtype=torch.float64),
        }

    def broadcast(self, state: IFCAState, ids: Tensor) -> Broadcast:
        """Send all K models, and as the model of the payload the one that the client chose last."""
        models = state["models"]
        cluster, p = state["cluster"], state["p"]
        mixing, columns = None, p.nonzero().flatten()
        if len(columns) and models:
            weights = (cluster[ids.cpu()][:, None] == cluster[columns]) * p[columns]
            total = weights.sum(1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1.0)
            mixing = MixingMatrices(ids, columns.to(ids.device), {"model": weights.to(ids.device)})
        chosen = models.rows(cluster[ids.cpu()].to(ids.device))
        return Broadcast(Payload(chosen, {"models": models.repeat(len(ids))}), mixing)

    def aggregate(self, state: IFCAState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> IFCAState:
        best = uploads.extra["cluster"]["best"]
        p = client_weights(n, self.weighting)
        weights = best.T.double() * p
        total = weights.sum(1)
        weights = weights / torch.where(total > 0, total, 1.0)[:, None]

        def average(old: Tensor, new: Tensor) -> Tensor:
            has_any = (total > 0).reshape(-1, *[1] * (old.dim() - 1))
            return torch.where(has_any, torch.tensordot(weights.to(new.dtype), new, 1), old)

        cluster, last = state["cluster"], state["p"]
        return {
            "models": state["models"].map(average, uploads.params),
            "cluster": cluster.index_copy_(0, ids.cpu(), best.argmax(1).cpu()),
            "p": last.zero_().index_copy_(0, ids.cpu(), p.cpu()),
        }

    def find_start(self, sent: Payload, uploads: Payload) -> Params:
        best = uploads.extra["cluster"]["best"]
        return sent.extra["models"].map(lambda v: torch.einsum("ck,ck...->c...", best.to(v.dtype), v))

    def measure_effects(self, state: IFCAState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        return measure_mixing(mixing)[:1]

    def bytes_down(self, state: IFCAState, ids: Tensor, sent: Payload) -> Traffic:
        """Count the K models; the model of the payload is one of them."""
        return sent.traffic() - count_traffic(sent.params)

    def newcomer_model(self, state: IFCAState) -> Params:
        """Return the model that most clients chose last; the newcomer chooses among all K."""
        return state["models"].rows(int(state["cluster"].mode().values))

    def add_clients(self, state: IFCAState, n_new: int) -> IFCAState:
        cluster, p = state["cluster"], state["p"]
        more = cluster.mode().values.expand(n_new)
        return change(state, cluster=torch.cat([cluster, more]), p=torch.cat([p, p.new_zeros(n_new)]))


@method(
    Family.MIXTURE,
    "K models, each the average of a cluster",
    "trains the one with the lowest loss on its samples",
    tune={"clusters": (2, 4)},
)
def ifca(
    *,
    clusters: Annotated[int, Field(ge=1, le=1000)] = 2,
    spread: Annotated[float, Field(ge=0)] = 1.0,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """The server keeps K models; each client trains the one that fits its samples best.

    Source: Ghosh et al. (2020), Algorithm 1 with option II, model averaging.

    Args:
        clusters: number K of models; 1 is FedAvg.
        spread: deviation of the noise between the K initial models, relative to the root mean square of each
            tensor.
        weighting: weights in the average of a cluster: `uniform`, as in the paper, or by training samples.
    """
    return Algorithm(IFCAClient(), IFCAServer(clusters, spread, weighting), evaluation_point="received")
