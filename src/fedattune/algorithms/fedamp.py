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

    FedAMP      xi_ij = alpha exp(-||theta_i - theta_j||^2 / sigma) / sigma,  xi_ii = 1 - sum_j xi_ij
    HeurFedAMP  xi_ij = (1 - xi_ii) softmax_j(sigma cos(theta_i, theta_j)),  xi_ii = self_weight
    server      u_i = sum_j xi_ij theta_j over the cohort
    client      theta_i <- theta_i - lr (g + prox (theta_i - u_i)), from u_i; prox = lam / alpha, or lam (HeurFedAMP)

In the paper, all clients take part. With a smaller cohort, the other clients continue to train towards their last u_i.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD, Proximal
from ..core.algorithm import ANSWERED_UPLOADS, Algorithm
from ..core.options import NonNegative, Positive
from ..core.payload import ServerState
from ..core.selectors import Unit
from ..server.mixing import Mixing, Pool, cosines, find_members, softmax_, squared_distances
from .table import Family, method

LOG_KERNEL_ERROR = 1e-9
"""Largest error of the logarithm of a kernel's value."""


@dataclass(frozen=True)
class AttentiveMixing(Mixing):
    """Server rule of FedAMP: weights by a Gaussian kernel of the distance between models (equations 4 to 6).

    For very similar models, a large alpha makes xi_ii negative. The rule then lowers alpha for all clients, so that the
    matrix stays symmetric. Each of K clients then gives its own model a weight of at least 1/K.

    Attributes:
        alpha: strength of the attraction.
        sigma: scale of the kernel, in units of the squared distance between models.

    """

    alpha: float = 1.0
    sigma: float = 1.0

    def weights(self, pool: Pool) -> Tensor:
        """Weigh the others by the kernel; the rest goes to the own model."""
        xi = self._kernel(pool)
        rows = (xi * _share_of_alpha(xi, pool.member))[pool.own].mul_(pool.allowed)
        return rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))

    def warnings(self, state: ServerState, ids: Tensor) -> tuple[str, ...]:
        """Warn if the last round lowered alpha."""
        whole = self.pool_for(state, ids, find_members(state))
        shares = [
            _share_of_alpha(self._kernel(pool), pool.member).item() for _, pool in self.split_pool(whole)
        ]
        if min(shares, default=1.0) == 1.0:  # no component at all: nothing is shared
            return ()
        return (
            f"alpha={self.alpha:g} gives the other models a total weight above 1, because the models are similar; "
            f"the last round used {self.alpha * min(shares):.3g} instead",
        )

    def _kernel(self, pool: Pool) -> Tensor:
        """Return the weights (K, K) in float64 before alpha is lowered; 0 outside the pool."""
        kernel = squared_distances(pool.parts, pool.member, error=LOG_KERNEL_ERROR * self.sigma)
        kernel = kernel.div_(-self.sigma).exp_()
        return kernel.mul_(self.alpha / self.sigma).fill_diagonal_(0.0).mul_(pool.member)


def _share_of_alpha(kernel: Tensor, member: Tensor) -> Tensor:
    """Return the factor of alpha that leaves every member of the pool at least 1/K of its own model."""
    # Over all members, not only the receivers: alpha must not depend on the receivers of a broadcast.
    sums = kernel.sum(1)[member]
    most = 1 - 1 / max(1, len(sums))
    return (most / sums.max().clamp_min(1e-30)).clamp_max(1.0) if len(sums) > 1 else sums.new_ones(())


@dataclass(frozen=True)
class CosineMixing(Mixing):
    """Server rule of HeurFedAMP: a fixed share for the own model, the rest by softmax of sigma cos over the others.

    Attributes:
        sigma: factor of the cosines in the softmax.
        self_weight: share of the own model; None puts the own model into the softmax, as FedMCSA's attention does.

    """

    sigma: float = 25.0
    self_weight: float | None = 0.5

    def weights(self, pool: Pool) -> Tensor:
        """Weigh the others by softmax, scaled to the rest of the own share."""
        scores = cosines(pool).mul_(self.sigma).masked_fill_(~pool.allowed, -torch.inf)
        if self.self_weight is None:
            return softmax_(scores)
        others = softmax_(scores.scatter_(1, pool.own[:, None], -torch.inf)).nan_to_num_(0.0)
        rows = others.mul_(1 - self.self_weight)
        return rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))


@method(Family.MIXTURE, "a mixture per client, by distance of models", "SGD with a pull to the mixture")
def fedamp(
    *, alpha: Positive = 1.0, sigma: Positive = 1.0, lam: NonNegative = 1.0, unit: Unit = "model"
) -> Algorithm:
    """Attentive message passing: clients with similar models attract each other.

    Source: Huang et al. (2021), Algorithm 1 and equations 4 to 6.

    Args:
        alpha: strength alpha of the attraction. For K clients, the server lowers alpha until the other models'
            weights sum to at most 1 - 1 / K.
        sigma: scale sigma of the kernel, in units of the squared distance between models.
        lam: strength lambda of the pull to u_i; the coefficient is lam / alpha, with alpha as given.
        unit: part of the model that shares one matrix xi: the whole `model`, as in the paper, a `layer`, or a `tensor`.

    """
    return Algorithm(
        SGD((Proximal(lam / alpha),), start="newest"),
        AttentiveMixing(unit, alpha=alpha, sigma=sigma),
        participation=ANSWERED_UPLOADS,
    )


@method(Family.MIXTURE, "a mixture per client, by cosine of models", "SGD with a pull to the mixture")
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
