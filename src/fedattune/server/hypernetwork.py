"""Small networks on the server, as functions of their weights: what learned mixing and generated models share."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..core.params import Params


def draw_uniform(low: float, high: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers drawn from U(low, high), of the type and device of `like`."""
    # Drawn on the CPU, so that they do not depend on the device.
    return (low + (high - low) * torch.rand(tuple(shape), dtype=like.dtype)).to(like.device)


def draw_normal(shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers drawn from N(0, 1), of the type and device of `like`."""
    return torch.randn(tuple(shape), dtype=like.dtype).to(like.device)


def draw_linear(inputs: int, outputs: Sequence[int], like: Tensor, networks: Sequence[int] = ()) -> Params:
    """Weight (*networks, *outputs, inputs) and bias (*networks, *outputs), drawn from U(-1, 1) / sqrt(inputs)."""
    bound = inputs**-0.5
    return Params(
        weight=draw_uniform(-bound, bound, (*networks, *outputs, inputs), like),
        bias=draw_uniform(-bound, bound, (*networks, *outputs), like),
    )


def draw_trunk(widths: Sequence[int], like: Tensor, networks: Sequence[int] = ()) -> Params:
    """Linear layers between `widths`, in order; with `networks`, one network for each of so many."""
    layers = [draw_linear(a, (b,), like, networks).items() for a, b in pairwise(widths)]
    return Params({f"{i}.{key}": value for i, layer in enumerate(layers) for key, value in layer})


def apply_trunk(layers: Params, v: Tensor) -> Tensor:
    """What a trunk makes of the embeddings v (R, E): (R, width), with ReLU between its layers.

    One network for all (weights (out, in)), or one for each row (weights (R, out, in)).
    """
    for i in range(len(layers) // 2):
        v = v.relu() if i else v
        v = apply_linear(v, layers[f"{i}.weight"], layers[f"{i}.bias"])
    return v


def apply_linear(v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer: (R, in) makes (R, out); one layer for all (weight (out, in)), or one for each row."""
    # A row times a matrix: many columns times many matrices are several times slower in batched products on CPUs.
    return (v[:, None] @ weight.mT)[:, 0] + bias


def select_prefix(params: Params, prefix: str) -> Params:
    """The tensors whose names begin with `prefix`, without it."""
    return Params({k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)})


def add_prefix(prefix: str, params: Params) -> Params:
    """The same tensors, their names beginning with `prefix`."""
    return Params({prefix + k: v for k, v in params.items()})
