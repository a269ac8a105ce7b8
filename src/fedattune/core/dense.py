"""Multiply matrices by the library that is fastest on this machine.

PyTorch multiplies float32 matrices by MKL. On processors with AVX-512 that are not Intel's, oneDNN, which PyTorch
brings for convolutions, takes a third to a half of the time. It needs matrices without gaps between their rows: with
gaps, it takes a thousand times as long.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .measured import choose

PYTORCH, ONEDNN = "PyTorch", "oneDNN"

MIN_PRODUCTS = 1 << 17
"""Multiplications from which a choice is worth its look-up, which takes microseconds."""

MEASURED_PRODUCTS = 1 << 28
"""Multiplications of a measured call at most; of larger products, some rows are measured. Few rows mislead: they stay
in a core's caches."""

MIN_LINEAR_GAIN = 1.05
"""Minimum speed-up for which oneDNN is chosen for a layer: noise changes the times of its long calls little."""

BLOCK_VALUES = 1 << 20
"""Values of a stack to copy at a time: they fit into caches, and their memory is used again."""

GPU_BLOCK_VALUES = 1 << 28
"""The same on a GPU, where a call costs more than the copy: a gigabyte of float32."""

MIN_BLOCK_COLUMNS = 512
"""Minimum columns of a stack to multiply at a time: with fewer, the additions cost more than the products."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 (as PyTorch has it)
    """Return input weight' + bias (m, n), without gradients, as `torch.nn.functional.linear` does up to rounding."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not (
        input.dim() == weight.dim() == 2
        and len(input) * weight.numel() >= MIN_PRODUCTS
        and input.is_contiguous()
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and _fit_onednn(*tensors)
    ):
        return functional.linear(input, weight, bias)
    some = input[: max(16, MEASURED_PRODUCTS // weight.numel())]
    calls = {
        PYTORCH: lambda: functional.linear(some, weight, bias),
        ONEDNN: lambda: _multiply_by_onednn(some, weight, bias),
    }
    if choose("linear layer", (len(input), *weight.shape), calls, MIN_LINEAR_GAIN) == ONEDNN:
        return _multiply_by_onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def multiply(weights: Tensor, models: Tensor, out: Tensor | None = None) -> Tensor:
    """Return weights (R, K) times models (K, P), in `out` if given."""
    if weights.numel() * models.shape[1] >= MIN_PRODUCTS and _fit_onednn(weights, models):
        some, part = weights[: _measured_rows(models)], models[:, next(column_blocks(*models.shape))]
        calls = {PYTORCH: lambda: torch.mm(some, part), ONEDNN: lambda: _multiply_block(some, part)}
        if choose("multiply", (*weights.shape, models.shape[1]), calls) == ONEDNN:
            out = models.new_empty(len(weights), models.shape[1]) if out is None else out
            for columns in column_blocks(*models.shape):
                out[:, columns] = _multiply_block(weights, models[:, columns])
            return out
    return torch.mm(weights, models, out=out)


def _multiply_block(weights: Tensor, models: Tensor) -> Tensor:
    return _multiply_by_onednn(weights.contiguous(), models.contiguous().t())


def add_dots(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the dot products (R, K) of the rows of a (R, P) with the rows of b (K, P) to `out`."""
    if out.numel() * a.shape[1] >= MIN_PRODUCTS and _fit_onednn(a, b):
        columns = next(column_blocks(*b.shape))
        some, part = a[: _measured_rows(b), columns], b[:, columns]
        calls = {PYTORCH: lambda: torch.mm(some, part.t()), ONEDNN: lambda: _dot_block(some, part)}
        if choose("dots", (*out.shape, a.shape[1]), calls) == ONEDNN:
            for columns in column_blocks(*b.shape):
                out += _dot_block(a[:, columns], b[:, columns])
            return
    out.addmm_(a, b.t())


def _dot_block(a: Tensor, b: Tensor) -> Tensor:
    is_same = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    whole = b.contiguous()
    return _multiply_by_onednn(whole if is_same else a.contiguous(), whole)


def column_blocks(rows: int, columns: int, device: torch.device | None = None) -> Iterator[slice]:
    """Cut the columns of a (rows, columns) matrix into blocks that fit into caches, on a GPU into its memory."""
    values = GPU_BLOCK_VALUES if device is not None and device.type != "cpu" else BLOCK_VALUES
    size = max(MIN_BLOCK_COLUMNS, values // max(1, rows))
    for start in range(0, columns, size):
        yield slice(start, start + size)


def _measured_rows(other: Tensor) -> int:
    return max(16, MEASURED_PRODUCTS // max(1, min(other.numel(), BLOCK_VALUES)))


def _fit_onednn(*tensors: Tensor) -> bool:
    """Tell whether oneDNN is there and takes such tensors: float32 on a CPU, without gradients, outside `vmap`."""
    has_onednn: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_onednn and all(
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and not (t.requires_grad and torch.is_grad_enabled())
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight' + bias by oneDNN's inner product, which compiled models of PyTorch call."""
    by_onednn: Any = torch.ops.mkldnn._linear_pointwise.default
    out: Tensor = by_onednn(x, weight, bias, "none", [], "")
    return out
