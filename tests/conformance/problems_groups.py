"""A problem on which a method that mixes models must act: clients of two groups with opposite tasks."""

import torch

import fedattune
from fedattune import Federation

GROUP = 4
"""Clients of each group: the first ones have one task, the rest the other."""


def two_groups(seed: int = 0) -> Federation:
    """Make eight clients with one rule; the last four have the inputs of the first four, and flipped labels.

    The mean of all models knows nothing, and the mean of a group knows more than a client learns from its 40 training
    samples.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(10, generator=generator)
    inputs = [torch.randn(60, 10, generator=generator) for _ in range(GROUP)]
    labels = [(x @ rule > 0).long() for x in inputs]
    first = list(zip(inputs, labels, strict=True))
    return fedattune.federation([*first, *((x, 1 - y) for x, y in first)])
