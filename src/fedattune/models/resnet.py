"""ResNet-18. He et al., CVPR 2016, https://arxiv.org/abs/1512.03385; parameters are called as in torchvision."""

from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn

from ..registry import Count
from .shapes import image_shape


class Block(nn.Module):
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
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, width, height / stride, width / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        added: Tensor = self.relu(out + shortcut)
        return added


def resnet18(
    input_shape: tuple[int, ...], n_classes: int, *, stem: Literal["7x7", "3x3"] = "7x7", width: Count = 64
) -> nn.Module:
    """ResNet-18, which FedAM trains: a stem and eight blocks of two convolutions, all normalised.

    The `7x7` stem is ImageNet's and leaves a quarter of each side; `3x3`, usual for images of 32x32, leaves all.
    The stages have 1, 2, 4 and 8 times `width` channels.
    """
    channels, _, _ = image_shape(input_shape)
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
            layer1=_stage(width, width, 1),
            layer2=_stage(width, 2 * width, 2),
            layer3=_stage(2 * width, 4 * width, 2),
            layer4=_stage(4 * width, 8 * width, 2),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(8 * width, n_classes),
        )
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def _stage(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(channels, width, stride), Block(width, width, 1))
