"""The networks of most papers, as factories of input shape and number of classes."""

import math

from torch import nn

from ..registry import Count
from .shapes import image_shape


def mlr(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_classes))


def dnn(input_shape: tuple[int, ...], n_classes: int, *, hidden: Count = 100) -> nn.Module:
    """One hidden layer with ReLU; FedMCSA has 100 units for images and 20 for Synthetic."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, n_classes),
    )


def cnn(
    input_shape: tuple[int, ...], n_classes: int, *, width: Count = 32, features: Count = 512
) -> nn.Module:
    """The 4-layer CNN of FedAM, FedCP and PFLlib: two 5x5 convolutions with pooling, then two linear layers."""
    channels, *size = image_shape(input_shape, smallest=16)
    rows, columns = (((s - 4) // 2 - 4) // 2 for s in size)
    return nn.Sequential(
        nn.Conv2d(channels, width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * rows * columns, features),
        nn.ReLU(),
        nn.Linear(features, n_classes),
    )
