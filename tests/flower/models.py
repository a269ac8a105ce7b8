"""Models of the tests' own, which nodes import by name."""

from torch import nn

from fedattune.core.options import Count


def normed(input_shape: tuple[int, ...], n_classes: int, *, hidden: Count = 6) -> nn.Module:
    """A model with a BatchNorm layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(input_shape[0], hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, n_classes)
    )
