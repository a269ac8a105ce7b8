"""Compute the same results by calls that take less time on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


FEW_COLUMNS, MANY_COLUMNS = 10, 128
"""Columns up to which another order of the product is faster: FEW in training, MANY in prediction."""


MIN_SUM_INPUTS = 512
"""Terms of a sum from which a product gains from another order."""


LONG_SUM_INPUTS = 2048
"""Terms of a sum from which, in training, products of up to MANY_COLUMNS columns gain as well."""


ROWS_PER_BLOCK = 12
"""Rows up to which MKL uses its fast products of small matrices."""


MIN_CHANNELS = 8
"""Channels from which images are pooled with adjacent channels."""


RETURN_INDICES_POSITION = 7
"""Position of the argument `return_indices` of `max_pool2d`."""


def multiply_narrow(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a b (C, m, n), for b with few columns, each contiguous, as (b' a')'.

    MKL then takes half the time, or less, for the logits of 20 samples, and two thirds for 100 hidden units on the
    pixels of a CIFAR image.
    """
    rows, inputs, columns = a.shape[1], a.shape[2], b.shape[2]
    few = columns <= FEW_COLUMNS < rows and inputs >= MIN_SUM_INPUTS
    long = FEW_COLUMNS < rows < columns <= MANY_COLUMNS and inputs >= LONG_SUM_INPUTS
    if not (few or long) or b.stride(1) != 1 or not _uses_mkl(a):
        return cast(Tensor, NotImplemented)
    return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2).contiguous()


def linear_in_blocks(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 (as PyTorch has it)
    """Apply a linear layer to samples (m, inputs), some rows at a time; MKL takes down to half the time."""
    n = len(input) // ROWS_PER_BLOCK if input.dim() == weight.dim() == 2 else 0
    if n < 2 or not _uses_mkl(input) or not input.is_contiguous():
        return linear(input, weight, bias)
    outputs, inputs = weight.shape
    if outputs > MANY_COLUMNS or inputs < MIN_SUM_INPUTS:
        return linear(input, weight, bias)
    n_rows, out = n * ROWS_PER_BLOCK, input.new_empty(len(input), outputs)
    blocks = input[:n_rows].view(n, ROWS_PER_BLOCK, inputs)
    torch.bmm(
        blocks, weight.t().expand(n, inputs, outputs), out=out[:n_rows].view(n, ROWS_PER_BLOCK, outputs)
    )
    torch.mm(input[n_rows:], weight.t(), out=out[n_rows:])
    return out if bias is None else out.add_(bias)


def _uses_mkl(x: Tensor) -> bool:
    available: Callable[[], bool] = torch.backends.mkl.is_available
    return x.device.type == "cpu" and x.dtype == torch.float32 and available()


def max_pool_with_indices(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Pool maxima and their indices as PyTorch does, with adjacent channels.

    On a CPU, PyTorch does not vectorize pooling in the usual layout: it takes two to four times as long.
    """
    adjacent = _channels_last(x)
    values, indices = aten.max_pool2d_with_indices.default(adjacent, *options)
    return (values, indices) if adjacent is x else (values.contiguous(), indices.contiguous())


def _channels_last(x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dim() != 4 or x.shape[1] < MIN_CHANNELS:
        return x
    return x.contiguous(memory_format=torch.channels_last)


class FastPrediction(TorchFunctionMode):
    """Replace slow calls of a model by faster ones with the same result; valid without gradients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or a faster function with the same result."""
        named = dict(kwargs or {})
        if func is linear:
            return linear_in_blocks(*args, **named)
        if func is max_pool2d and 0 < len(args) < RETURN_INDICES_POSITION and not named.get("return_indices"):
            return func(_channels_last(args[0]), *args[1:], **named).contiguous()
        return func(*args, **named)
