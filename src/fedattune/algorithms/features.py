"""Let client rules read features, of which they see only gradients: for FedProto and FedDBE."""

from torch import Tensor

READING = 1e-4
"""Factor of the sums that clients read from the gradient: their part of its norm, which may be limited, is small."""


def add_reading(sums: Tensor, counts: Tensor, features: Tensor, one_hot: Tensor) -> Tensor:
    """Return a term of a loss, of value 0, whose gradient holds sums of features by group, for client rules to read.

    Args:
        sums: (G, f) a parameter whose values stay zero. Its gradient is the sum of the features of each group.
        counts: (G,) another one. Its gradient is the number of samples of each group. Both are multiplied by `READING`.
        features: (B, f) the batch's features; they get no gradient from the term.
        one_hot: (B, G) the group of each sample.
    """
    return READING * ((sums * (one_hot.T @ features.detach())).sum() + (counts * one_hot.sum(0)).sum())
