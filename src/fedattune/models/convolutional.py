"""Convolutional networks of single papers, as factories of input shape and number of classes."""

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from ..registry import Count
from .shapes import image_shape

Dropped = Annotated[float, Field(ge=0, lt=1)]
"""Share of the units that dropout sets to 0."""


def lenet(
    input_shape: tuple[int, ...],
    n_classes: int,
    *,
    conv1: Count = 16,
    conv2: Count = 32,
    batch_norm: bool = False,
) -> nn.Module:
    """The LeNet of pFedHN, and with `conv1=6` and `conv2=16` the `base_cnn` of FedFomo.

    Two 5x5 convolutions of `conv1` and `conv2` channels with pooling, then linear layers of 120 and 84 units.
    pFedLA normalises both convolutions over the batch for CIFAR.
    """
    channels, *size = image_shape(input_shape, smallest=16)
    rows, columns = (((s - 4) // 2 - 4) // 2 for s in size)
    return nn.Sequential(
        nn.Conv2d(channels, conv1, 5),
        *([nn.BatchNorm2d(conv1)] if batch_norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(conv1, conv2, 5),
        *([nn.BatchNorm2d(conv2)] if batch_norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(conv2 * rows * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, n_classes),
    )


def tf_cnn(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """The `tf_cnn` of FedFomo: three 3x3 convolutions, pooling after two of them, and 64 linear units."""
    channels, *size = image_shape(input_shape, smallest=18)
    rows, columns = (((s - 2) // 2 - 2) // 2 - 2 for s in size)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, 64),
        nn.ReLU(),
        nn.Linear(64, n_classes),
    )


def mcmahan_cnn(input_shape: tuple[int, ...], n_classes: int, *, lrn: bool = False) -> nn.Module:
    """The CIFAR network of the FedAvg paper, which IGFL trains: two 5x5 convolutions, three linear layers.

    McMahan et al. (AISTATS 2017, section 3) take it from TensorFlow's tutorial and crop images to 24x24.
    `lrn` is the tutorial's local response normalisation, x / (1 + 0.001/9 sum x^2)^0.75 over 9 channels.
    """
    channels, *size = image_shape(input_shape, smallest=4)
    rows, columns = (s // 4 for s in size)
    # PyTorch divides alpha by the number of channels; TensorFlow does not.
    normalise = [nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)] if lrn else []
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),  # 32 -> 16 -> 8, as TensorFlow's "same" padding does
        *normalise,
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        *normalise,
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, n_classes),
    )


def reddi_cnn(
    input_shape: tuple[int, ...], n_classes: int, *, conv_dropout: Dropped = 0.25, fc_dropout: Dropped = 0.5
) -> nn.Module:
    """The EMNIST network of the FedAdam paper, which IGFL trains: two 3x3 convolutions, dropout, 128 units.

    Reddi et al. (ICLR 2021, https://arxiv.org/abs/2003.00295). Weights start Glorot-normal, biases at 0.
    """
    channels, *size = image_shape(input_shape, smallest=6)
    rows, columns = ((s - 4) // 2 for s in size)
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(conv_dropout),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, 128),
        nn.ReLU(),
        nn.Dropout(fc_dropout),
        nn.Linear(128, n_classes),
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return model


def digit_model(
    input_shape: tuple[int, ...], n_classes: int, *, batch_norm: Literal["all", "conv", "none"] = "all"
) -> nn.Module:
    """The DigitModel of FedBN: three 5x5 convolutions, linear layers of 2048 and 512 units, all normalised.

    Li et al. (ICLR 2021, https://arxiv.org/abs/2102.07623). `batch_norm` after `all` layers, after convolutions
    only (`conv`), or nowhere.
    """
    channels, *size = image_shape(input_shape, smallest=4)
    rows, columns = (s // 4 for s in size)

    def norm_conv(width: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(width)] if batch_norm != "none" else []

    def norm_linear(width: int) -> list[nn.Module]:
        return [nn.BatchNorm1d(width)] if batch_norm == "all" else []

    return nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2),
        *norm_conv(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2),
        *norm_conv(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 5, padding=2),
        *norm_conv(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * rows * columns, 2048),
        *norm_linear(2048),
        nn.ReLU(),
        nn.Linear(2048, 512),
        *norm_linear(512),
        nn.ReLU(),
        nn.Linear(512, n_classes),
    )
