"""Limit what enters one client's mixture of models: the rows of a mixing matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP = 2.0
"""Largest distance from the own model, in the median distance of the row, at which a model enters unclipped."""


@dataclass(frozen=True)
class MixtureLimits:
    """Limits of the weights of other clients' models in a mixture; what they lose goes to the client's own model.

    Attributes:
        max_share: largest weight of any one other client; None for no limit.
        clip: leave out models whose cosine with the own model is below 0, and clip the others to `CLIP` times the
            median distance from the own model. To clip theta_k - theta_i is to scale the weight of theta_k.
    """

    max_share: float | None = None
    clip: bool = False

    def apply(self, weights: Tensor, own: Tensor, products: Tensor | None, squares: Tensor | None) -> Tensor:
        """Return the limited weights (R, K).

        Args:
            weights: (R, K) a mixing matrix.
            own: (R,) column of each row's own model.
            products: (R, K) dot products of the own models with all; needed to clip.
            squares: (K,) squared norms of all; likewise.
        """
        columns = own[:, None]
        others = weights.scatter(1, columns, 0.0)
        if self.clip and products is not None and squares is not None:
            distances = (squares[own][:, None] + squares - 2 * products).clamp_min(0).sqrt()
            counted = distances.masked_fill(others == 0, torch.nan)  # the models that have a weight set the scale
            scale = CLIP * counted.nanmedian(1, keepdim=True).values.nan_to_num(0.0)
            others = others * (scale / distances.clamp_min(1e-30)).clamp_max(1).to(others.dtype)
            others = others.masked_fill(products < 0, 0.0)
        if self.max_share is not None:
            others = others.clamp_max(self.max_share)
        return others.scatter(1, columns, 1 - others.sum(1, keepdim=True))
