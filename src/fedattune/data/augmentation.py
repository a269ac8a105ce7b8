"""Change the images of training batches by chance: crops and flips, as torchvision's transforms do.

The move of an image is one whole number: where the crop begins in the padded image, and whether it is flipped. It
stands above bit MOVE_BIT of a sample number, so that batches of plain and of moved samples are laid out alike.
"""

import numpy as np
import torch
from torch import Tensor

from ..core.settings import Augmentation
from .types import Index

PADDING = 4
"""Zeros on each side of an image before it is cropped to its size, in pixels."""
MOVE_BIT = 40
"""Bits of a sample number without a move."""


def add_moves(samples: Index, kinds: tuple[Augmentation, ...], rng: np.random.Generator) -> Index:
    """Draw a move for each sample number; -1, which fills a batch, stays."""
    n_starts = 2 * PADDING + 1
    top, left, is_flipped = (np.full(samples.shape, value) for value in (PADDING, PADDING, 0))
    if "crop" in kinds:
        top, left = rng.integers(n_starts, size=(2, *samples.shape))
    if "flip" in kinds:
        is_flipped = rng.integers(2, size=samples.shape)
    moves = 1 + (is_flipped * n_starts + top) * n_starts + left
    return np.where(samples < 0, samples, samples + (moves << MOVE_BIT))


def split_moves(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split sample numbers of at least 0 into plain ones and moves; None where no sample has a move."""
    if not numbers.numel() or int(numbers.max()) < 1 << MOVE_BIT:
        return numbers, None
    return numbers & ((1 << MOVE_BIT) - 1), numbers >> MOVE_BIT


def move_images(images: Tensor, moves: Tensor, padding: int = PADDING) -> Tensor:
    """Move images (n, C, H, W) by `moves` (n,): pad with zeros, crop, then flip. TorchScript can compile this."""
    n, channels, height, width = images.size()
    n_starts = 2 * padding + 1
    move = moves.clamp_min(1).view(n, 1) - 1  # a sample that fills a batch has no move
    left, top, is_flipped = move % n_starts, move // n_starts % n_starts, move >= n_starts * n_starts
    columns = torch.arange(width, device=images.device).unsqueeze(0)
    columns = torch.where(is_flipped, width - 1 - columns, columns) + left - padding
    rows = torch.arange(height, device=images.device).unsqueeze(0) + top - padding
    has_row, has_column = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    is_outside = ~(has_row.unsqueeze(2) & has_column.unsqueeze(1)).view(n, 1, height * width)
    places = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    places = places.view(n, 1, height * width).expand(n, channels, height * width)
    return images.flatten(2).gather(2, places).masked_fill(is_outside, 0).view(n, channels, height, width)
