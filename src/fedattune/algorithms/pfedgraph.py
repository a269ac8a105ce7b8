"""pFedGraph.

    @inproceedings{ye2023personalized,
      author = {Ye, Rui and Ni, Zhenyang and Wu, Fangzhao and Chen, Siheng and Wang, Yanfeng},
      title = {Personalized Federated Learning with Inferred Collaboration Graphs},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2023}
    }

Rules, with the initial model theta^0 and the shares p_j = n_j / sum_k n_k of the samples:

    server   w_i <- argmin sum_j w_ij d_ij + alpha sum_j (w_ij - p_j)^2  so that  sum_j w_ij = 1,  w_ij >= 0
             d_ij = -cos(theta_i - theta^0, theta_j - theta^0)
             u_i = sum_j w_ij theta_j
    client   from u_i: SGD on f_i(theta) - lam cos(theta, u_i)

The row w_i is the projection of p_j - d_ij / (2 alpha) onto the simplex.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..client import SGD, Correction, LocalContext
from ..core.algorithm import Algorithm, Participation, ServerTraits
from ..core.effect import Mechanism
from ..core.options import NonNegative, Positive
from ..core.params import Params, squared_norm
from ..server.average import Weighting
from ..server.mixing import Mixing, Pool, StoreState, cosines
from ..server.products import TensorLoader, flatten
from .table import Family, method


class GraphState(StoreState):
    """A store of uploads, and the initial model."""

    start: Params


@dataclass(frozen=True)
class UpdatePool(Pool):
    """A pool that compares its models by their updates from the model `start`."""

    start: Params

    @property
    def parts(self) -> list[TensorLoader]:
        return [partial(lambda one: flatten(self.tensor(one) - self.start[one]), name) for name in self.models]


def project_to_simplex(v: Tensor) -> Tensor:
    """Return the point nearest to each row of `v` (R, K) whose values are not negative and sum to 1.

    A value of -inf becomes 0. Each row needs a finite value.
    """
    v = v - v.amax(1, keepdim=True)  # the same point, without rounding where values are large
    largest = v.sort(1, descending=True).values
    excess = largest.cumsum(1) - 1
    counts = torch.arange(1, v.shape[1] + 1, device=v.device)
    n_positive = (largest * counts > excess).sum(1, keepdim=True)
    return (v - excess.gather(1, n_positive - 1) / n_positive).clamp_min(0)


@dataclass(frozen=True)
class CollaborationGraph(Mixing):
    """Server rule of pFedGraph: each row of weights solves a quadratic programme of similarities and sample shares.

    Options: see `pfedgraph`.
    """

    alpha: float = 0.8
    weighting: Weighting = "samples"

    traits = ServerTraits(GraphState)

    def init(self, w0: Params, n_clients: int) -> StoreState:
        return cast(StoreState, {**super().init(w0, n_clients), "start": w0})

    def pool_for(self, state: StoreState, ids: Tensor, members: Tensor) -> Pool:
        return UpdatePool(**vars(super().pool_for(state, ids, members)), start=cast(GraphState, state)["start"])

    def weights(self, pool: Pool) -> Tensor:
        n = pool.n.double() if self.weighting == "samples" else torch.ones_like(pool.n, dtype=torch.float64)
        p = n * pool.allowed
        p /= p.sum(1, keepdim=True)
        target = p + cosines(pool).double() / (2 * self.alpha)
        return project_to_simplex(target.masked_fill_(~pool.allowed, -torch.inf))


@dataclass(frozen=True)
class CosinePull(Correction):
    """The gradient of -lam cos(w, u), with the model u that was last sent; personal tensors have no part in it."""

    lam: float

    mechanism = Mechanism("steps", "steps without the cosine to the mixture", "one without the cosine")

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        names = [name for name in w if name not in local.context.personal_names]
        if not names:
            return g
        theta, u = w.only(names), local.sent.params.only(names)
        square, dot = squared_norm(theta), torch.stack([v.sum() for v in (theta * u).values()]).sum()
        scale = (square * squared_norm(u)).sqrt()
        # A zero model has no direction, and no pull.
        slope = torch.where(scale > 0, self.lam / torch.where(scale > 0, scale, 1), 0)
        pull = slope * (u - dot / torch.where(square > 0, square, 1) * theta)
        return Params({**g, **(g.only(names) - pull)})


@method(
    Family.MIXTURE,
    "a mixture per client, by similarity of updates and samples",
    "SGD that keeps the direction of the mixture",
    tune={"alpha": (0.2, 0.8, 3.0), "lam": (0.0, 0.1, 1.0)},
)
def pfedgraph(*, alpha: Positive = 0.8, lam: NonNegative = 0.1, weighting: Weighting = "samples") -> Algorithm:
    """Each client receives a mixture by a graph of who helps whom, from similar updates and many samples.

    Source: Ye et al. (2023).

    Args:
        alpha: weight alpha of the distance from the sample shares p_j; a large value is FedAvg, a small one is training
            alone, because a client is most similar to itself.
        lam: weight lambda of the cosine to the mixture; 0 is plain SGD.
        weighting: shares p_j: by training samples, or `uniform`.
    """
    return Algorithm(
        SGD((CosinePull(lam),), start="newest"),
        CollaborationGraph(alpha=alpha, weighting=weighting),
        participation=Participation(receive="answer"),
    )
