"""Evaluate small networks on the server as functions of their weights: shared by pFedLA and pFedHN."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..core.params import Params, add_prefix, as_slice, select_prefix


def draw_uniform(low: float, high: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Draw from U(low, high); the result has the type and device of `like`."""
    # The CPU draws, so that numbers do not depend on the device.
    return (low + (high - low) * torch.rand(tuple(shape), dtype=like.dtype)).to(like.device)


def draw_normal(shape: Sequence[int], like: Tensor) -> Tensor:
    """Draw from N(0, 1); the result has the type and device of `like`."""
    return torch.randn(tuple(shape), dtype=like.dtype).to(like.device)


def draw_linear(inputs: int, outputs: Sequence[int], like: Tensor, networks: Sequence[int] = ()) -> Params:
    """Draw a weight (*networks, *outputs, inputs) and a bias (*networks, *outputs) from U(-1, 1) / sqrt(inputs)."""
    bound = inputs**-0.5
    return Params(
        weight=draw_uniform(-bound, bound, (*networks, *outputs, inputs), like),
        bias=draw_uniform(-bound, bound, (*networks, *outputs), like),
    )


def draw_trunk(widths: Sequence[int], like: Tensor, networks: Sequence[int] = ()) -> Params:
    """Draw linear layers between consecutive `widths`; `networks` is the shape of a stack of such networks."""
    layers = [draw_linear(a, (b,), like, networks).items() for a, b in pairwise(widths)]
    return Params({f"{i}.{key}": value for i, layer in enumerate(layers) for key, value in layer})


def draw_stack(widths: Sequence[int], heads: Params) -> Params:
    """Draw the embeddings and trunks of R networks for `apply_stack`, beside heads of (R, L, K) outputs."""
    like = heads["bias"]
    layers = draw_trunk(widths, like, (len(like),))
    v = draw_normal((len(like), widths[0]), like)
    return Params({"embedding": v, **add_prefix("trunk.", layers), **add_prefix("head.", heads)})


def apply_trunk(layers: Params, v: Tensor) -> Tensor:
    """Map embeddings v (R, E) to features (R, width) by linear layers, with ReLU between them.

    One network serves all rows (weights (out, in)), or each row has its own (weights (R, out, in)).
    """
    for i in range(len(layers) // 2):
        v = v.relu() if i else v
        v = apply_linear(v, layers[f"{i}.weight"], layers[f"{i}.bias"])
    return v


def apply_linear(v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map v (R, in) to (R, out) by one linear layer (weight (out, in)), or by one layer per row (R, out, in)."""
    # A row times a matrix is several times faster than a matrix times a column in batched products on CPUs.
    return (v[:, None] @ weight.mT)[:, 0] + bias


def apply_stack(networks: Params) -> Tensor:
    """Return the outputs (R, L, K) of R networks of an `embedding`, a `trunk.` with ReLU, and linear heads `head.`."""
    return _apply_heads(_features(networks), networks)


def append_networks(networks: Params, new: Params) -> Params:
    """Append networks with more outputs per head (R, L, K + M) to R networks, whose new outputs are zero."""
    n_more = new["head.bias"].shape[2] - networks["head.bias"].shape[2]
    wider = {
        key: torch.cat([old, old.new_zeros(*old.shape[:2], n_more, *old.shape[3:])], 2)
        for key, old in ((key, networks[key]) for key in ("head.weight", "head.bias"))
    }
    return Params({**networks, **wider}).map(lambda a, b: torch.cat([a, b]), new)


def descend(networks: Params, activation: Callable[[Tensor], Tensor], gradient: Tensor, lr: float) -> None:
    """Take a gradient step of R networks in place, by the gradient (R, L, K) of the activations of their outputs."""
    heads = networks["head.weight"].flatten(1, 2)
    small = networks.without(("head.weight", "head.bias"))
    with torch.enable_grad():
        leaves = small.map(lambda a: a.detach().requires_grad_())
        h = _features(leaves)
        z = _apply_heads(h.detach(), networks).requires_grad_()
        (grad_z,) = torch.autograd.grad(activation(z), z, gradient)
        grad_h = (grad_z.flatten(1)[:, None] @ heads)[:, 0]
        values = torch.autograd.grad(h, list(leaves.values()), grad_h)
    for old, g in zip(small.values(), values, strict=True):
        old.sub_(g, alpha=lr)
    networks["head.bias"].sub_(grad_z, alpha=lr)
    # The heads are the largest part; their gradient, a product of two vectors, is never stored.
    heads.baddbmm_(grad_z.flatten(1)[:, :, None], h.detach()[:, None], alpha=-lr)


def descend_rows(
    stack: Params, ids: Tensor, activation: Callable[[Tensor], Tensor], gradient: Tensor, lr: float
) -> None:
    """Take the step of `descend` for networks `ids` of a stack, in memory or on disk, in place."""
    rows = as_slice(ids)
    networks = stack.rows(rows)
    descend(networks, activation, gradient, lr)
    if not (isinstance(stack, Params) and isinstance(rows, slice)):  # the networks were a copy
        stack.put_rows(ids, networks)


def _features(networks: Params) -> Tensor:
    return apply_trunk(select_prefix(networks, "trunk."), networks["embedding"]).relu()


def _apply_heads(h: Tensor, networks: Params) -> Tensor:
    bias = networks["head.bias"]
    return apply_linear(h, networks["head.weight"].flatten(1, 2), bias.flatten(1)).view(bias.shape)
