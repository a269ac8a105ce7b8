"""Multiply stacks of models by weights and with each other; the products need hardly any memory beside the result."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..core.dense import add_dots, column_blocks, multiply

MIN_HALVED_MODELS = 512
"""Number of models above which half of a symmetric product is copied from the other half."""

TensorLoader = Callable[[], Tensor]
"""Returns one tensor of a stack as (K, P); the tensor may be a temporary copy."""


def flatten(tensor: Tensor) -> Tensor:
    """Flatten all axes behind the first: (K, P)."""
    return tensor.reshape(len(tensor), -1)


def mix(weights: Tensor, models: Tensor, out: Tensor | None = None) -> Tensor:
    """Return sum_k weights[i, k] models[k] (R, ...), from `weights` (R, K) and `models` (K, ...)."""
    shape = (len(weights), *models.shape[1:])
    into = None if out is None else out.view(len(weights), -1)
    stack, weights = flatten(models), weights.to(models.dtype)
    return multiply(weights, stack, into).view(shape)


def dots(parts: Iterable[TensorLoader], rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    """Return the dot products of some rows of a stack with all rows, of size (R, K)."""
    out: Tensor | None = None
    for part in parts:
        out = _accumulate_dots(out, part(), rows, size)
    if out is None:
        raise ValueError("dots: got a component without tensors, expected one at least")
    return out


def _accumulate_dots(out: Tensor | None, a: Tensor, rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    # A separate function, so that one part is freed before the next is made.
    out = a.new_zeros(size) if out is None else out
    _add_dots(out, a[rows], a)
    return out


def _add_dots(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b' to `out`; if a is b, copy the half above the diagonal from the half below it."""
    n = len(b)
    if n < MIN_HALVED_MODELS or a.data_ptr() != b.data_ptr() or len(a) != n:
        add_dots(out, a, b)
        return
    half = n // 2
    add_dots(out[:half, :half], b[:half], b[:half])
    add_dots(out[half:], b[half:], b)
    out[:half, half:] = out[half:, :half].T


def squared_distances(parts: Sequence[TensorLoader], like: Tensor, error: float) -> Tensor:
    """Return ||theta_i - theta_j||^2 (K, K) in float64 between the K models of a stack.

    Products of centred models give the distances. If rounding could exceed `error`, because one model is far from the
    mean, the differences of all pairs do, which takes longer. The result is on the device of `like` (K,).
    """
    n = len(like)
    out = torch.zeros(n, n, dtype=torch.float64, device=like.device)
    for part in parts:
        _add_centred_dots(out, part())
    norms = out.diagonal().clone()
    if norms.max() * torch.finfo(torch.float64).eps <= error:
        return out.mul_(-2).add_(norms).add_(norms[:, None]).clamp_min_(0)
    out.zero_()
    for part in parts:
        out += torch.cdist(a := part(), a, compute_mode="donot_use_mm_for_euclid_dist").double().square_()
        del a
    return out


def _add_centred_dots(out: Tensor, models: Tensor) -> None:
    for columns in column_blocks(2 * len(models), models.shape[1], models.device):
        part = models[:, columns].to(torch.float64, copy=True)
        part -= part.mean(0)
        _add_dots(out, part, part)


def sum_variances(models: Tensor) -> Tensor:
    """Return the sum over columns of the variance of models (K, P); `var` takes ten times as long."""
    squares: Tensor = torch.linalg.vector_norm(models).square()
    return squares / len(models) - models.mean(0).square().sum()


def softmax_(scores: Tensor) -> Tensor:
    """Take the softmax of each row in place."""
    scores.sub_(scores.amax(1, keepdim=True)).exp_()
    return scores.div_(scores.sum(1, keepdim=True))
