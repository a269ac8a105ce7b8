"""Mixing matrices from how alike the clients' models are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .mixing import Mixing, Pool


def cosines(pool: Pool) -> Tensor:
    """Cosine (R, K) of each receiving client's component with every other; 1 with its own, 0 with zeros."""
    unit = pool.theta / pool.theta.norm(dim=1, keepdim=True).clamp_min(1e-12)
    alike: Tensor = unit[pool.own] @ unit.T
    return alike.scatter(1, pool.own[:, None], 1.0)


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
        scores = self.sigma * cosines(pool)
        if self.size_weighted:
            scores = scores + pool.n.to(scores.dtype).log()
        return torch.softmax(scores.masked_fill(~pool.allowed, -torch.inf), 1)


@dataclass(frozen=True)
class AMP(Mixing):
    """Attentive message passing: xi_ij = alpha A'(||theta_i - theta_j||^2), xi_ii = 1 - sum_j xi_ij.

    A'(x) = exp(-x / sigma) / sigma. Source: FedAMP (Huang et al., 2021), equations 4 to 6. Where a row would sum
    to more than 1 (models still too alike for this alpha), alpha is lowered for all until none does: the matrix
    stays symmetric.
    """

    alpha: float = 1.0
    sigma: float = 1.0

    def weights(self, pool: Pool) -> Tensor:
        """Gaussian kernel of the distances; what is left goes to the own model."""
        xi = (self.alpha / self.sigma) * torch.exp(-(torch.cdist(pool.theta, pool.theta) ** 2) / self.sigma)
        xi = xi.fill_diagonal_(0.0) * pool.member
        # All rows of the pool, not only the receivers': alpha must not depend on who happens to be sent to.
        xi = xi / xi.sum(1)[pool.member].amax().clamp_min(1.0) if pool.member.any() else xi
        rows = xi[pool.own] * pool.allowed
        return rows.scatter(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))


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
        scores = (self.sigma * cosines(pool)).masked_fill(~pool.allowed, -torch.inf)
        if self.self_weight is None:
            return torch.softmax(scores, 1)
        others = torch.softmax(scores.scatter(1, pool.own[:, None], -torch.inf), 1).nan_to_num(0.0)
        rows = (1 - self.self_weight) * others
        return rows.scatter(1, pool.own[:, None], 1 - rows.sum(1, keepdim=True))
