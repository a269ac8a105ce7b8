"""Losses of samples."""

import torch
from torch import nn

from fedattune.core.task import compute_sample_losses


def test_losses_are_cross_entropy() -> None:
    logits, y = 40 * torch.randn(50, 7).double(), torch.randint(0, 7, (50,))
    expected = nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(compute_sample_losses(logits, y), expected, rtol=1e-12, atol=1e-12)
