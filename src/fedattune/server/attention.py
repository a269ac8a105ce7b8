"""Mixing matrices from how alike the clients' models are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import State
from .mixing import Mixing, Pool, members
from .products import softmax_, squared_distances

ROUNDING = 1e-9
"""Error that the logarithm of a kernel's value may have."""


def cosines(pool: Pool) -> Tensor:
    """Cosine (R, K) of each receiving client's component with every other; 1 with its own, 0 with zeros."""
    alike = pool.dots()
    scale = pool.squares(alike).sqrt().clamp_min(1e-12).reciprocal()
    alike.mul_(scale[pool.own][:, None]).mul_(scale)
    alike.nan_to_num_(0.0, 0.0, 0.0)  # models so large that their lengths are infinite resemble nobody
    return alike.scatter_(1, pool.own[:, None], 1.0)


@dataclass(frozen=True)
class Attention(Mixing):
    """Model-component self-attention: M_l = row softmax of sigma cos(theta_l, theta_l).

    Source: FedMCSA (2022), equations 6 to 8, with the denominator of (7) summed over the row, as the text says.
    `size_weighted` multiplies by the sample counts before the rows are normalised, as the public code does.
    """

    sigma: float = 50.0
    size_weighted: bool = False

    def weights(self, pool: Pool) -> Tensor:
        """Softmax over the allowed models."""
        scores = cosines(pool).mul_(self.sigma)
        if self.size_weighted:
            scores += pool.n.to(scores.dtype).log()
        return softmax_(scores.masked_fill_(~pool.allowed, -torch.inf))


@dataclass(frozen=True)
class AMP(Mixing):
    """Attentive message passing: xi_ij = alpha A'(||theta_i - theta_j||^2), xi_ii = 1 - sum_j xi_ij.

    A'(x) = exp(-x / sigma) / sigma. Source: FedAMP (Huang et al., 2021), equations 4 to 6. While models are too
    alike for this alpha, xi_ii would be negative; alpha is then lowered for all, which keeps the matrix symmetric,
    until every one of K clients gives its own model a weight of 1/K at least.
    """

    alpha: float = 1.0
    sigma: float = 1.0

    def weights(self, pool: Pool) -> Tensor:
        """Gaussian kernel of the distances; what is left goes to the own model."""
        xi = self._kernel(pool)
        rows = (xi * _share_of_alpha(xi, pool.member))[pool.own].mul_(pool.allowed)
        return rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))

    def remarks(self, state: State, ids: Tensor) -> tuple[str, ...]:
        """Say so if alpha was lowered in the last round."""
        who = self.receivers(state, ids, members(state))
        pools = (self.one(state, names, who) for names in self.components(state).values())
        shares = [_share_of_alpha(self._kernel(pool), pool.member).item() for pool in pools]
        if min(shares, default=1.0) == 1.0:  # no component at all: nothing is shared
            return ()
        return (
            f"alpha={self.alpha:g} gives the other models a weight of more than 1 as long as models are this alike; "
            f"in the last round {self.alpha * min(shares):.3g} was used instead",
        )

    def _kernel(self, pool: Pool) -> Tensor:
        """The weights (K, K) of the pool's members, before alpha is lowered, in float64; zero for all others."""
        kernel = squared_distances(pool.parts, pool.member, error=ROUNDING * self.sigma)
        kernel = kernel.div_(-self.sigma).exp_()
        return kernel.mul_(self.alpha / self.sigma).fill_diagonal_(0.0).mul_(pool.member)


def _share_of_alpha(kernel: Tensor, member: Tensor) -> Tensor:
    """What alpha is multiplied by, so that no member of the pool keeps less than 1/K of its own."""
    # Over all members and not only the receivers: alpha must not depend on who happens to be sent to.
    sums = kernel.sum(1)[member]
    most = 1 - 1 / max(1, len(sums))
    return (most / sums.max().clamp_min(1e-30)).clamp_max(1.0) if len(sums) > 1 else sums.new_ones(())


@dataclass(frozen=True)
class HeurAMP(Mixing):
    """A fixed share for the own model, the rest by softmax of sigma cos over the others.

    Source: FedAMP (Huang et al., 2021), section on HeurFedAMP. `self_weight=None` puts the own model into the
    softmax with the others, which is FedMCSA's attention over whole models.
    """

    sigma: float = 25.0
    self_weight: float | None = 0.5

    def weights(self, pool: Pool) -> Tensor:
        """Softmax over the others, scaled by what the own model leaves."""
        scores = cosines(pool).mul_(self.sigma).masked_fill_(~pool.allowed, -torch.inf)
        if self.self_weight is None:
            return softmax_(scores)
        others = softmax_(scores.scatter_(1, pool.own[:, None], -torch.inf)).nan_to_num_(0.0)
        rows = others.mul_(1 - self.self_weight)
        return rows.scatter_(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))
