"""Samples gathered from where they are kept, and normalised on the way."""

import torch
from torch import Tensor


def gather(
    x: Tensor, index: Tensor, shift: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x - shift) * scale of the samples `index`, of any shape: (*index.shape, *sample); can be scripted."""
    found = x.index_select(0, index.reshape(-1)).to(dtype)
    if shift is not None:
        found.sub_(shift)
    if scale is not None:
        found.mul_(scale)
    return found.view(index.size() + x.size()[1:])
