"""The networks of the papers, as factories of input shape and number of classes."""

import math
from collections import OrderedDict
from itertools import pairwise
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from ..core.citing import cite
from ..core.errors import ModelError
from ..core.options import Count
from ..data.tables.texts import N_CHARACTERS
from ..data.types import Shape

DropoutRate = Annotated[float, Field(ge=0, lt=1)]
"""Share of the units that dropout sets to 0."""


def mlr(input_shape: Shape, n_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(*_stack_linear(math.prod(input_shape), n_classes))


@cite("""
@article{hastie1986generalized,
  author = {Hastie, Trevor and Tibshirani, Robert},
  title = {Generalized Additive Models},
  journal = {Statistical Science},
  volume = {1},
  number = {3},
  pages = {297--310},
  year = {1986}
}
""")
def gam(input_shape: Shape, n_classes: int, *, numbers: Annotated[int, Field(ge=0)] | None = None) -> nn.Module:
    """A generalized additive model: one linear layer on the inputs, and on seven hat functions of each number.

    So the output is a sum of curves, one of each number: piecewise linear up to two standard deviations from the mean,
    one straight line beyond. The numbers should have mean 0 and standard deviation 1, as those of tables have.

    Args:
        numbers: inputs that get curves, the first ones; None is all inputs, and of a table its numbers.
    """
    n_inputs = math.prod(input_shape)
    if numbers is not None and numbers > n_inputs:
        raise ValueError(f"numbers={numbers}: the data have {n_inputs} inputs")
    hats = HatFunctions(n_inputs if numbers is None else numbers)
    return nn.Sequential(nn.Flatten(), hats, nn.Linear(n_inputs + N_HATS * hats.numbers, n_classes))


N_HATS, HAT_DISTANCE = 7, 0.5
"""Number and distance of the hats: from -1.5 to 1.5 standard deviations."""


class HatFunctions(nn.Module):
    """Inputs (B, F) to the inputs and the hat functions of the first N (B, F + 7 N).

    A hat function is 1 at its centre and 0 at those beside it. Marks of categories get none: with a hat at 0, each of
    them would add 1 for every category that a row lacks, and a rate that suits a linear model would be too large.
    """

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        end = HAT_DISTANCE * (N_HATS - 1) / 2
        centres = torch.linspace(-end, end, N_HATS, dtype=x.dtype, device=x.device)
        hats = functional.relu(1 - (x[:, : self.numbers].unsqueeze(-1) - centres).abs() / HAT_DISTANCE)
        return torch.cat([x, hats.flatten(1)], dim=1)


def dnn(input_shape: Shape, n_classes: int, *, hidden: Count = 100) -> nn.Module:
    """One hidden layer with ReLU; FedMCSA has 100 units for images and 20 for Synthetic.

    Args:
        hidden: units of the hidden layer.
    """
    return nn.Sequential(*_stack_linear(math.prod(input_shape), hidden, n_classes))


@cite("zhang2023fedcp")
def cnn(input_shape: Shape, n_classes: int, *, width: Count = 32, features: Count = 512) -> nn.Module:
    """The 4-layer CNN of FedAM, FedCP and PFLlib: two 5x5 convolutions with pooling, then two linear layers.

    Args:
        input_shape: channels, height and width; 16x16 at least.
        width: channels of the first convolution; the second one has twice as many.
        features: units of the first linear layer.
    """
    return _build_lenet(input_shape, width, 2 * width, features, n_classes)


@cite("shamsian2021personalized")
def lenet(
    input_shape: Shape, n_classes: int, *, conv1: Count = 16, conv2: Count = 32, batch_norm: bool = False
) -> nn.Module:
    """The LeNet of pFedHN, and with `conv1=6` and `conv2=16` the `base_cnn` of FedFomo.

    Args:
        input_shape: channels, height and width; 16x16 at least.
        conv2: channels of the second 5x5 convolution. Linear layers of 120 and 84 units follow.
        batch_norm: normalise both convolutions over the batch, as pFedLA does for CIFAR.
    """
    return _build_lenet(input_shape, conv1, conv2, 120, 84, n_classes, batch_norm=batch_norm)


@cite("zhang2021personalized")
def tf_cnn(input_shape: Shape, n_classes: int) -> nn.Module:
    """The `tf_cnn` of FedFomo: three 3x3 convolutions, pooling after two of them, and 64 linear units."""
    channels, *size = _check_image_shape(input_shape, smallest=18)
    rows, columns = (((s - 2) // 2 - 2) // 2 - 2 for s in size)
    return nn.Sequential(
        *_convolve(channels, 32, 3),
        nn.MaxPool2d(2),
        *_convolve(32, 64, 3),
        nn.MaxPool2d(2),
        *_convolve(64, 64, 3),
        *_stack_linear(64 * rows * columns, 64, n_classes),
    )


@cite("mcmahan2017communication")
def mcmahan_cnn(input_shape: Shape, n_classes: int, *, lrn: bool = False) -> nn.Module:
    """The CIFAR network of the FedAvg paper, which IGFL trains: two 5x5 convolutions, three linear layers.

    McMahan et al. (AISTATS 2017, section 3) take the network from TensorFlow's tutorial and crop images to 24x24.

    Args:
        input_shape: channels, height and width; 4x4 at least.
        lrn: add the tutorial's local response normalisation, x / (1 + 0.001/9 sum x^2)^0.75 over 9 channels.
    """
    channels, *size = _check_image_shape(input_shape, smallest=4)
    rows, columns = (s // 4 for s in size)
    # PyTorch divides alpha by the number of channels; TensorFlow does not.
    normalise = [nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)] if lrn else []
    return nn.Sequential(
        *_convolve(channels, 64, 5, padding=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),  # 32 -> 16 -> 8, as TensorFlow's "same" padding does
        *normalise,
        *_convolve(64, 64, 5, padding=2),
        *normalise,
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        *_stack_linear(64 * rows * columns, 384, 192, n_classes),
    )


@cite("reddi2021adaptive")
def reddi_cnn(
    input_shape: Shape, n_classes: int, *, conv_dropout: DropoutRate = 0.25, fc_dropout: DropoutRate = 0.5
) -> nn.Module:
    """The EMNIST network of the FedAdam paper, which IGFL trains: two 3x3 convolutions, dropout, 128 units.

    Reddi et al. (ICLR 2021, https://arxiv.org/abs/2003.00295). Weights start Glorot-normal, biases at 0.

    Args:
        input_shape: channels, height and width; 6x6 at least.
    """
    channels, *size = _check_image_shape(input_shape, smallest=6)
    rows, columns = ((s - 4) // 2 for s in size)
    convolutions = [*_convolve(channels, 32, 3), *_convolve(32, 64, 3)]
    flatten, first, relu, last = _stack_linear(64 * rows * columns, 128, n_classes)
    model = nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Dropout(conv_dropout), flatten, first, relu, nn.Dropout(fc_dropout), last
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return model


@cite("li2021fedbn")
def digit_model(input_shape: Shape, n_classes: int, *, batch_norm: Literal["all", "conv", "none"] = "all") -> nn.Module:
    """The DigitModel of FedBN: three 5x5 convolutions, linear layers of 2048 and 512 units, all normalised.

    Li et al. (ICLR 2021, https://arxiv.org/abs/2102.07623).

    Args:
        input_shape: channels, height and width; 4x4 at least.
        batch_norm: normalise after `all` layers but the last, after convolutions only (`conv`), or nowhere.
    """
    channels, *size = _check_image_shape(input_shape, smallest=4)
    rows, columns = (s // 4 for s in size)
    norm_conv, norm_linear = batch_norm != "none", batch_norm == "all"
    return nn.Sequential(
        *_convolve(channels, 64, 5, padding=2, batch_norm=norm_conv),
        nn.MaxPool2d(2),
        *_convolve(64, 64, 5, padding=2, batch_norm=norm_conv),
        nn.MaxPool2d(2),
        *_convolve(64, 128, 5, padding=2, batch_norm=norm_conv),
        *_stack_linear(128 * rows * columns, 2048, 512, n_classes, batch_norm=norm_linear),
    )


@cite("""
@inproceedings{he2016deep,
  author = {He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  title = {Deep Residual Learning for Image Recognition},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2016},
  eprint = {1512.03385},
  archiveprefix = {arXiv}
}
""")
def resnet18(
    input_shape: Shape, n_classes: int, *, stem: Literal["7x7", "3x3"] = "7x7", width: Count = 64
) -> nn.Module:
    """ResNet-18, which FedAM trains: a stem and eight blocks of two convolutions, all normalised.

    He et al. (CVPR 2016, https://arxiv.org/abs/1512.03385). Parameters have torchvision's names.

    Args:
        stem: `7x7`, ImageNet's, leaves a quarter of each side; `3x3`, usual for images of 32x32, leaves all.
        width: channels of the first stage; the other stages have 2, 4 and 8 times as many.
    """
    channels, _, _ = _check_image_shape(input_shape)
    if stem == "7x7":
        first = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        pool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
    else:
        first = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        pool = nn.Identity()
    model = nn.Sequential(
        OrderedDict(
            conv1=first,
            bn1=nn.BatchNorm2d(width),
            relu=nn.ReLU(),
            maxpool=pool,
            layer1=_make_stage(width, width, 1),
            layer2=_make_stage(width, 2 * width, 2),
            layer3=_make_stage(2 * width, 4 * width, 2),
            layer4=_make_stage(4 * width, 8 * width, 2),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(8 * width, n_classes),
        )
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: relu(x + f(x)), with a 1x1 convolution of x where sizes differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return cast(Tensor, self.relu(out + shortcut))


def _check_image_shape(input_shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """Return channels, height and width; refuse samples that are no images, or smaller ones."""
    if len(input_shape) != 3:
        raise ValueError(
            f"the data has inputs of shape {input_shape}; expected images (channels, height, width): take mlr or dnn"
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"images of {height}x{width} are too small; the network needs {smallest}x{smallest} at least: "
            "take mlr or dnn"
        )
    return channels, height, width


def _build_lenet(input_shape: Shape, conv1: int, conv2: int, *widths: int, batch_norm: bool = False) -> nn.Module:
    """Make two 5x5 convolutions with pooling, and linear layers of these widths."""
    channels, *size = _check_image_shape(input_shape, smallest=16)
    rows, columns = (((s - 4) // 2 - 4) // 2 for s in size)
    return nn.Sequential(
        *_convolve(channels, conv1, 5, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        *_convolve(conv1, conv2, 5, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        *_stack_linear(conv2 * rows * columns, *widths),
    )


def _convolve(channels: int, width: int, size: int, *, padding: int = 0, batch_norm: bool = False) -> list[nn.Module]:
    """Make a convolution of `size` x `size` pixels and its ReLU, with BatchNorm in between if asked."""
    norm = [nn.BatchNorm2d(width)] if batch_norm else []
    return [nn.Conv2d(channels, width, size, padding=padding), *norm, nn.ReLU()]


def _stack_linear(*widths: int, batch_norm: bool = False) -> list[nn.Module]:
    """Make a flattening and linear layers between these widths, with ReLU (and BatchNorm) after all but the last."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths[:-1]):
        norm = [nn.BatchNorm1d(outputs)] if batch_norm else []
        layers += [nn.Linear(inputs, outputs), *norm, nn.ReLU()]
    return [*layers, nn.Linear(widths[-2], widths[-1])]


def _make_stage(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_ResidualBlock(channels, width, stride), _ResidualBlock(width, width, 1))


@cite("caldas2018leaf")
def char_lstm(
    input_shape: Shape,
    n_classes: int,
    *,
    embedding: Count = 8,
    hidden: Count = 256,
    layers: Count = 2,
    vocabulary: Count = N_CHARACTERS,
) -> nn.Module:
    """The network of LEAF for Shakespeare: an embedding of 8, two LSTM layers of 256 units, one linear layer.

    It predicts from the last character of the text, as in `models/shakespeare/stacked_lstm.py` of LEAF. The forget
    gates start with a bias of 1, as in TensorFlow's `BasicLSTMCell`, which LEAF uses.

    Args:
        input_shape: number of characters, as token numbers; see the table option `tokens=characters`.
        hidden: units of an LSTM layer.

    Source: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018 (arXiv 1812.01097).
    """
    if len(input_shape) != 1:
        raise ModelError(
            f"char_lstm: got samples of shape {input_shape}, expected a sequence of token numbers; read a text column "
            "with --set table.tokens=characters"
        )
    return CharacterLstm(vocabulary, embedding, hidden, layers, n_classes)


class CharacterLstm(nn.Module):
    """Token numbers (B, length), -1 where there is no token, to logits (B, classes)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, n_classes: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, embedding)  # row 0 is for no token
        sizes = [embedding, *(hidden for _ in range(layers))]
        self.layers = nn.ModuleList([LstmLayer(a, b) for a, b in pairwise(sizes)])
        self.classifier = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x.long().clamp_min(-1) + 1)
        for layer in self.layers:
            h = layer(h)
        return cast(Tensor, self.classifier(h[:, -1]))


class LstmLayer(nn.Module):
    """One LSTM layer, written step by step, because `torch.func.vmap` has no rule for `nn.LSTM`.

    On a CPU, it takes about as long as `nn.LSTM`: the products with the inputs of all steps are one product.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.hidden_weight = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        for weight in (self.input_weight, self.hidden_weight):
            nn.init.xavier_uniform_(weight)
        with torch.no_grad():
            self.bias[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences (B, length, inputs) to the states (B, length, hidden) after each step."""
        gates = functional.linear(x, self.input_weight, self.bias)
        state = cell = torch.zeros_like(gates[:, 0, : self.hidden])
        states = []
        for gate in gates.unbind(1):
            take, keep, new, show = (gate + functional.linear(state, self.hidden_weight)).chunk(4, dim=1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)
