"""Matrix products over stacks of models, a part at a time: beside their result they take next to no memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

BLOCK_VALUES = 1 << 20
"""Values of a stack that are copied at a time: few enough to stay in caches, and in memory that is used again."""


MIN_BLOCK_COLUMNS = 512
"""Columns of a stack that are multiplied at a time at least: with fewer, adding up products costs more than they do."""


MIN_HALVED_MODELS = 512
"""From so many models on, half of a symmetric product is left out."""


Part = Callable[[], Tensor]
"""Gives one tensor of a stack as (K, P); it may be gathered for that, and is gone when nobody holds it."""


Offload = Callable[[Callable[..., Tensor], Tensor, Any, int, bool], Tensor | None]
"""elsewhere(piece, models, rest, rows, summed): what piece(some columns of models, rest) gives, of so many rows, added
up or joined by columns; None: it is to be done here."""


_offload: ContextVar[Offload | None] = ContextVar("elsewhere", default=None)


@contextmanager
def offload_products(work: Offload) -> Iterator[None]:
    """Within it, `work` is offered the large products."""
    token = _offload.set(work)
    try:
        yield
    finally:
        _offload.reset(token)


def _try_offload(
    piece: Callable[..., Tensor], models: Tensor, rest: Any, rows: int, *, summed: bool
) -> Tensor | None:
    work = _offload.get()
    return None if work is None else work(piece, models, rest, rows, summed)


def flatten(tensor: Tensor) -> Tensor:
    """(K, P): all axes behind the first as one."""
    return tensor.reshape(len(tensor), -1)


def column_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut the columns of a (rows, columns) matrix."""
    size = max(MIN_BLOCK_COLUMNS, BLOCK_VALUES // max(1, rows))
    for start in range(0, columns, size):
        yield slice(start, start + size)


def mix(weights: Tensor, models: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_k weights[i, k] models[k]: (R, K) and (K, ...) make (R, ...)."""
    shape = (len(weights), *models.shape[1:])
    into = None if out is None else out.view(len(weights), -1)
    stack, weights = flatten(models), weights.to(models.dtype)
    if (found := _try_offload(_mixture, stack, weights, len(weights), summed=False)) is not None:
        return (found if into is None else into.copy_(found)).view(shape)
    return torch.mm(weights, stack, out=into).view(shape)


def _mixture(models: Tensor, weights: Tensor) -> Tensor:
    return torch.mm(weights, models)


def dots(parts: Iterable[Part], rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    """Dot products (R, K) of the `rows` of a stack, whose tensors are `parts`, with all of it; `size` is (R, K)."""
    out: Tensor | None = None
    for part in parts:
        out = _accumulate_dots(out, part(), rows, size)
    if out is None:
        raise ValueError("dots: got a component without tensors, expected one at least")
    return out


def _accumulate_dots(out: Tensor | None, a: Tensor, rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    # A function of its own, so that the part is gone before the next one is made.
    if (found := _try_offload(_dots, a, rows, size[0], summed=True)) is not None:
        return found if out is None else out.add_(found)
    out = a.new_zeros(size) if out is None else out
    _add_dots(out, a[rows], a)
    return out


def _dots(models: Tensor, rows: Tensor | slice) -> Tensor:
    some = models[rows]
    out = models.new_zeros(len(some), len(models))
    _add_dots(out, some, models)
    return out


def _add_dots(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b^T to `out`; where a is b, the half above the diagonal is that below it."""
    n = len(b)
    if n < MIN_HALVED_MODELS or a.data_ptr() != b.data_ptr() or len(a) != n:
        out.addmm_(a, b.T)
        return
    half = n // 2
    out[:half, :half].addmm_(b[:half], b[:half].T)
    out[half:].addmm_(b[half:], b.T)
    out[:half, half:] = out[half:, :half].T


def squared_distances(parts: Sequence[Part], like: Tensor, error: float) -> Tensor:
    """||theta_i - theta_j||^2 (K, K) in float64 between K models of a stack, whose tensors are `parts`; `like` (K,).

    By products, of models moved to their mean, in float64; where one model is so far from the mean that rounding could
    exceed `error`, by the differences of all pairs, which is slower.
    """
    n = len(like)
    out = torch.zeros(n, n, dtype=torch.float64, device=like.device)
    for part in parts:
        if (found := _try_offload(_centred_dots, models := part(), None, n, summed=True)) is not None:
            out += found
        else:
            _add_centred_dots(out, models)
        del models
    lengths = out.diagonal().clone()
    if lengths.max() * torch.finfo(torch.float64).eps <= error:
        return out.mul_(-2).add_(lengths).add_(lengths[:, None]).clamp_min_(0)
    out.zero_()
    for part in parts:
        out += torch.cdist(a := part(), a, compute_mode="donot_use_mm_for_euclid_dist").double().square_()
        del a
    return out


def _centred_dots(models: Tensor, _: None) -> Tensor:
    out = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    _add_centred_dots(out, models)
    return out


def _add_centred_dots(out: Tensor, models: Tensor) -> None:
    for columns in column_blocks(2 * len(models), models.shape[1]):
        part = models[:, columns].to(torch.float64, copy=True)
        part -= part.mean(0)
        _add_dots(out, part, part)


def softmax_(scores: Tensor) -> Tensor:
    """Softmax over each row, in place."""
    scores.sub_(scores.amax(1, keepdim=True)).exp_()
    return scores.div_(scores.sum(1, keepdim=True))
