"""FedAMP and HeurFedAMP.

    @inproceedings{huang2021personalized,
      author = {Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and
        Pei, Jian and Zhang, Yong},
      title = {Personalized Cross-Silo Federated Learning on Non-{IID} Data},
      booktitle = {AAAI Conference on Artificial Intelligence},
      year = {2021},
      eprint = {2007.03797},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    FedAMP      xi_ij = alpha_k exp(-||theta_i - theta_j||^2 / sigma),  xi_ii = 1 - sum_j xi_ij
    HeurFedAMP  xi_ij = (1 - xi_ii) softmax_j(sigma cos(theta_i, theta_j)),  xi_ii = self_weight
    server      u_i = sum_j xi_ij theta_j over the cohort
    client      from u_i: argmin f_i + lam / (2 alpha_k) ||theta_i - u_i||^2 by steps (FedAMP)
                theta_i <- (theta_i - lr g + lr c u_i) / (1 + lr c),  c = lam / alpha_k
                from u_i: theta_i <- theta_i - lr (g + lam (theta_i - u_i)) (HeurFedAMP)

In the paper, all clients take part. With a smaller cohort, the other clients continue to train towards their last u_i.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD, Correction, LocalContext, Proximal
from ..core.algorithm import ANSWERED_UPLOADS, Advisory, Algorithm
from ..core.effect import Mechanism
from ..core.options import NonNegative, Positive
from ..core.params import Params
from ..core.payload import Broadcast
from ..core.selectors import Unit, group_names
from ..server.mixing import Mixing, Pool, StoreState, cosines, find_members
from ..server.products import softmax_, squared_distances
from .table import Family, method

Distance = Literal["relative", "absolute"]
"""Unit of sigma: the mean squared distance between the round's models, or 1."""

DEFAULT_ALPHA, DEFAULT_SIGMA = 1.0, 0.25

LOG_KERNEL_ERROR = 1e-9
"""Largest error of the logarithm of a kernel's value, for absolute distances."""

EQUAL_MODELS = 1e-24
"""Models with a smaller mean squared distance are equal, up to rounding."""


@dataclass(frozen=True)
class AttentiveMixing(Mixing, Advisory):
    """Server rule of FedAMP: weights by a Gaussian kernel of the distance between models (equations 4 to 6).

    Where alpha makes some xi_ii less than 1/K, for K models, the round takes a smaller alpha_k, the same for all
    clients. The matrix stays symmetric. Clients are sent alpha_k, because their pull to u_i is lam / alpha_k. A client
    outside the pool that is near to K - 1 members also keeps 1/K of its own model at least. Options: see `fedamp`.
    """

    alpha: float = DEFAULT_ALPHA
    sigma: float = DEFAULT_SIGMA
    distance: Distance = "relative"

    def broadcast(self, state: StoreState, ids: Tensor) -> Broadcast:
        """Send the mixtures, and alpha_k of every component: of none if nothing is shared."""
        payload, mixing = super().broadcast(state, ids)
        return Broadcast(payload._replace(extra={"alpha": Params(), **payload.extra}), mixing)

    def weights(self, pool: Pool) -> Tensor:
        return self.weights_and_numbers(pool)[0]

    def weights_and_numbers(self, pool: Pool) -> tuple[Tensor, dict[str, Tensor]]:
        kernel = self._kernel(pool)
        alpha = self._step(kernel, pool.member)
        rows = kernel[pool.own].mul_(alpha).mul_(pool.allowed)
        # alpha_k bounds the weights of members. A receiver outside the pool can be nearer to all of them.
        outside = ~pool.member[pool.own]
        if outside.any():
            n = int(pool.member.sum())
            rows[outside] *= (n / (n + 1) / rows[outside].sum(1, keepdim=True).clamp_min(1e-30)).clamp_max(1)
        rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))
        return rows, {"alpha": alpha}

    def warnings(self, state: StoreState, ids: Tensor) -> tuple[str, ...]:
        """State the alpha_k of the last round if it is below alpha, for absolute distances.

        For relative distances, the largest step is the default.
        """
        if self.distance == "relative":
            return ()
        whole = self.pool_for(state, ids, find_members(state))
        steps = [self._step(self._kernel(pool), pool.member).item() for _, pool in self.split_pool(whole)]
        if min(steps, default=self.alpha) == self.alpha:  # no component at all: nothing is shared
            return ()
        return (
            f"alpha={self.alpha:g} gives the other models too much weight, because many models are similar; "
            f"the last round used {min(steps):.3g} instead, also in the clients' pull",
        )

    def _kernel(self, pool: Pool) -> Tensor:
        """Return exp(-||theta_i - theta_j||^2 / sigma) (K, K) in float64; 0 for i = j and outside the pool."""
        member = pool.member
        if self.distance == "absolute":
            squares = squared_distances(pool.parts, member, LOG_KERNEL_ERROR * self.sigma)
            unit = 1.0
        else:  # rounding errors are small beside the mean
            squares, n = squared_distances(pool.parts, member, math.inf), int(member.sum())
            unit = max(float(squares[member][:, member].sum()) / max(1, n * (n - 1)), EQUAL_MODELS)
        kernel = squares.div_(-self.sigma * unit)
        return kernel.exp_().fill_diagonal_(0.0).mul_(member)

    def _step(self, kernel: Tensor, member: Tensor) -> Tensor:
        """Return alpha_k: alpha, or less if a member of the pool would keep less than 1/K of its own model."""
        # Over all members, not only the receivers: alpha_k must not depend on the receivers of a broadcast.
        sums = kernel.sum(1)[member]
        if len(sums) < 2:
            return kernel.new_tensor(self.alpha)
        return ((1 - 1 / len(sums)) / sums.max().clamp_min(1e-30)).clamp_max(self.alpha)


@dataclass(frozen=True)
class ProximalStep(Correction):
    """Client rule of FedAMP: each local step is a proximal step on lam / (2 alpha_k) ||w - u||^2, u as last sent.

    The step is w - lr g' with g' = (g + c (w - u)) / (1 + lr c) and c = lam / alpha_k. It minimises the linear model of
    the loss plus ||. - w||^2 / (2 lr) plus the pull, and is stable for every alpha_k. Personal tensors take plain
    steps. `unit` is that of the server rule.
    """

    lam: float
    unit: Unit = "model"

    required_extras: ClassVar[dict[str, str]] = {"alpha": "AttentiveMixing"}
    mechanism = Mechanism("steps", "steps without the pull to the mixture", "one without the pull")
    suits_optimizers = False

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        u, lr, corrected = local.sent.params, local.context.lr, dict(g)
        shared = [name for name in w if name not in local.context.personal_names]
        for component, names in group_names(shared, self.unit).items():
            c = self.lam / local.sent.extra["alpha"][component]
            for k in names:
                corrected[k] = (g[k] + c * (w[k] - u[k])) / (1 + lr * c)
        return Params(corrected)


@dataclass(frozen=True)
class CosineMixing(Mixing):
    """Server rule of HeurFedAMP: a fixed share for the own model, the rest by softmax of sigma cos over the others.

    A `self_weight` of None puts the own model into the softmax, as FedMCSA's attention does.
    """

    sigma: float = 25.0
    self_weight: float | None = 0.5

    def weights(self, pool: Pool) -> Tensor:
        scores = cosines(pool).mul_(self.sigma).masked_fill_(~pool.allowed, -torch.inf)
        if self.self_weight is None:
            return softmax_(scores)
        others = softmax_(scores.scatter_(1, pool.own[:, None], -torch.inf)).nan_to_num_(0.0)
        rows = others.mul_(1 - self.self_weight)
        return rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))


@method(
    Family.MIXTURE,
    "a mixture per client, by distance of models",
    "SGD with a pull to the mixture",
    tune={"lam": (0.03, 0.1, 0.3)},
)
def fedamp(
    *,
    alpha: Positive = DEFAULT_ALPHA,
    sigma: Positive = DEFAULT_SIGMA,
    lam: NonNegative = 0.1,
    distance: Distance = "relative",
    unit: Unit = "model",
) -> Algorithm:
    """Attentive message passing: clients with similar models attract each other.

    Source: Huang et al. (2021), Algorithm 1 and equations 4 to 6, with A(x) = sigma (1 - exp(-x / sigma)). The paper's
    A lacks the first sigma: its alpha and lambda are sigma times these.

    Args:
        alpha: largest step alpha_k of a round, which scales the message passing and the clients' steps. For K clients,
            alpha_k is at most what leaves each client 1 / K of its own model.
        sigma: scale of the kernel: the squared distance over which a weight falls to 1/e.
        lam: strength lambda of the attraction; the coefficient of the pull to u_i is lam / alpha_k.
        distance: unit of sigma: `relative` is the mean squared distance between the round's models; `absolute` is 1, as
            in the paper.
        unit: part of the model that shares one matrix xi: the whole `model`, as in the paper, a `layer`, or a `tensor`.
    """
    return Algorithm(
        SGD((ProximalStep(lam, unit),), start="newest"),
        AttentiveMixing(unit, alpha=alpha, sigma=sigma, distance=distance),
        participation=ANSWERED_UPLOADS,
    )


@method(
    Family.MIXTURE,
    "a mixture per client, by cosine of models",
    "SGD with a pull to the mixture",
    tune={"sigma": (10.0, 25.0, 100.0), "self_weight": (0.25, 0.5, 0.75)},
)
def heurfedamp(
    *,
    sigma: NonNegative = 25.0,
    self_weight: Annotated[float, Field(ge=0, le=1)] | Literal["attention"] = 0.5,
    lam: NonNegative = 1.0,
    unit: Unit = "model",
) -> Algorithm:
    """Message passing by cosine, with a fixed share for the own model.

    Source: Huang et al. (2021), HeurFedAMP.

    Args:
        sigma: factor sigma of the cosines in the softmax; 0 weighs the other clients equally.
        self_weight: share xi_ii of the own model, 0 to 1; the paper has 1 / (M + 1) for M other clients of the same
            distribution, so 0.5 means M = 1. `attention` puts the own model into the softmax.
        lam: strength lambda of the pull to u_i.
        unit: part of the model that shares one matrix xi; see `fedamp`.
    """
    share = None if self_weight == "attention" else self_weight
    return Algorithm(
        SGD((Proximal(lam),), start="newest"),
        CosineMixing(unit, sigma=sigma, self_weight=share),
        participation=ANSWERED_UPLOADS,
    )
