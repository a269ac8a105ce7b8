"""Compute the same results by calls that take less time on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d
from torch.overrides import TorchFunctionMode

from ..core import dense

aten = torch.ops.aten

MIN_CHANNELS = 8
"""Adjacent channels from which pooling is vectorized."""

MAX_CHANNELS = 256
"""Adjacent channels up to which images are put together; more take longer to arrange than to pool."""

QUARTERS = ((2, 2), (2, 2), (0, 0), (1, 1))
"""Kernel, stride, padding and dilation with which the maxima of four pixels take two vectorized operations."""


def max_pool_with_indices(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Pool maxima and their indices as PyTorch does, with adjacent channels.

    On a CPU, PyTorch does not vectorize pooling in the usual layout: it takes two to four times as long.
    """
    values, indices = aten.max_pool2d_with_indices.default(_make_adjacent(x), *options)
    return _separate(values, x), _separate(indices, x)


def _make_adjacent(x: Tensor) -> Tensor:
    """Make the channels of each pixel adjacent; those of several images where one image has few."""
    if x.device.type != "cpu" or x.dim() != 4:
        return x
    images, channels, *size = x.shape
    together = 1
    if channels < MIN_CHANNELS:
        together = next((n for n in range(MAX_CHANNELS // channels, 1, -1) if images % n == 0), 1)
    if together * channels < MIN_CHANNELS:
        return x
    return x.reshape(images // together, together * channels, *size).contiguous(memory_format=torch.channels_last)


def _separate(pooled: Tensor, x: Tensor) -> Tensor:
    return pooled.contiguous().view(*x.shape[:-2], *pooled.shape[-2:])


def _max_pool(x: Tensor, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, **more: Any) -> Tensor:
    how = tuple(map(_pair, (kernel, kernel if stride is None else stride, padding, dilation)))
    height, width = (n - n % 2 for n in x.shape[-2:])
    if how == QUARTERS and height and width and not more.get("ceil_mode"):  # PyTorch refuses smaller images
        rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])
    return _separate(max_pool2d(_make_adjacent(x), kernel, stride, padding, dilation, **more), x)


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def replace_slow_calls(device: torch.device) -> AbstractContextManager[object]:
    """Make a context in which a model's slow calls on a CPU are replaced; valid without gradients."""
    return FastPrediction() if device.type == "cpu" else nullcontext()


class FastPrediction(TorchFunctionMode):
    """Replace slow calls of a model by faster ones with the same result; valid without gradients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is linear:
            return dense.linear(*args, **named)
        if func is max_pool2d and not named.get("return_indices"):
            return _max_pool(*args, **named)
        return func(*args, **named)
