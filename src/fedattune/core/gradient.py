"""Differentiate a loss inside `vmap`, without the import of PyTorch's compiler.

`torch.func.grad` enters `torch._dynamo` to tell the compiler what it does. This alone imports the compiler, which takes
most of a second in every new process: longer than the whole work of a short message to a client.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.func import grad, vmap

from .params import Params
from .payload import Batch

LossFunction = Callable[[Params, Params, Batch], tuple[Tensor, Params]]
"""loss(parameters, buffers, batch) -> mean loss, and the buffers after it."""

PARTS = (
    "_grad_increment_nesting", "_grad_decrement_nesting", "_wrap_for_grad", "_unwrap_for_grad",
    "set_inplace_requires_grad_allowed",
)  # fmt: skip
"""The parts of PyTorch from which `torch.func.grad` is made; another version of PyTorch may lack them."""


def differentiate(loss: LossFunction, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Params]:
    """Return the gradient of the loss, and the buffers after it; works under `vmap` and under gradients."""
    if not all(hasattr(functorch, part) for part in PARTS):
        g, changed = grad(loss, has_aux=True)(params, buffers, batch)
        return g, changed
    with _new_level() as level, torch.enable_grad():

        def wrap(tensor: Tensor) -> Tensor:
            return functorch._wrap_for_grad(tensor, level)

        def unwrap(tensor: Tensor) -> Tensor:
            return functorch._unwrap_for_grad(tensor, level)

        w = params.map(wrap)
        functorch.set_inplace_requires_grad_allowed(True)
        try:
            for tensor in w.values():
                tensor.requires_grad_()
        finally:
            functorch.set_inplace_requires_grad_allowed(False)
        value, changed = loss(w, buffers.map(wrap), tuple(map(wrap, batch)))
        # With a graph of the gradient, so that a gradient outside this one finds it.
        return take_gradient(value, w, create_graph=True).map(unwrap), changed.map(unwrap)


def take_gradient(loss: Tensor, w: Params, *, create_graph: bool = False) -> Params:
    """Return the gradient of a loss by the tensors `w`; zeros for those that it does not depend on."""
    tensors = tuple(w.values())
    if not loss.requires_grad:
        return w.zeros()
    found = torch.autograd.grad(loss, tensors, create_graph=create_graph, allow_unused=True)
    return Params({k: torch.zeros_like(v) if d is None else d for (k, v), d in zip(w.items(), found, strict=True)})


def sum_clipped(loss: LossFunction, params: Params, buffers: Params, batch: Batch, clip: float, at_once: int) -> Params:
    """Return the weighted sum of the gradients of single samples, each clipped to a norm; works under `vmap`.

    The loss must not let samples see each other. No sample moves the sum by more than `clip` times its weight: a
    gradient that is not finite counts as zero. Source: Abadi et al. (CCS 2016), Algorithm 1, without its noise.
    """

    def differentiate_one(*sample: Tensor) -> Params:
        return differentiate(loss, params, buffers, tuple(t[None] for t in sample))[0]

    total = params.zeros()
    for x, y, weight in zip(*(torch.split(t, at_once) for t in batch), strict=True):
        each = vmap(differentiate_one, randomness="different")(x, y)
        flat = {k: v[..., None].flatten(1) for k, v in each.items()}  # the further axis is for single numbers
        parts = torch.stack([torch.linalg.vector_norm(v, dim=1) for v in flat.values()])
        norms = torch.linalg.vector_norm(parts, dim=0)
        is_finite = norms.isfinite()
        factors = torch.where(is_finite, weight * (clip / norms.clamp_min(1e-12)).clamp_max(1.0), 0.0)
        for k, v in each.items():
            rows = torch.where(is_finite[:, None], flat[k], 0.0)
            total[k] = total[k] + (factors @ rows).view(v.shape[1:])
    return total


@contextmanager
def _new_level() -> Iterator[int]:
    level: int = functorch._grad_increment_nesting()
    try:
        yield level
    finally:
        functorch._grad_decrement_nesting()
