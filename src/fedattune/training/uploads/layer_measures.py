"""Measure the updates of a round, layer by layer: norm, and share of the sent layer; and sample their values."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.params import Params, find_layer
from ...core.payload import Payload
from ...server.products import flatten

MAX_SAMPLED_VALUES = 1024
"""Values of a layer whose directions are compared."""


class LayerMeasures(NamedTuple):
    """Measures of one layer, for C clients.

    Attributes:
        names: tensors of the layer.
        squares: (C,) squared norm of the update.
        sent_squares: (C,) squared norm of the layer that was sent, or in place of it the median of the uploads.
        shares: (C,) share of that layer that the upload keeps.
    """

    names: list[str]
    squares: Tensor
    sent_squares: Tensor
    shares: Tensor


def measure_layers(upload: Payload, sent: Payload, *, are_models_sent: bool) -> dict[str, LayerMeasures]:
    """Measure every layer of the uploads of a round."""
    before = sent.params if are_models_sent else Params()
    layers: dict[str, list[str]] = {}
    for name in upload.params:
        layers.setdefault(find_layer(name), []).append(name)
    return {layer: _measure(upload.params.only(names), before) for layer, names in layers.items()}


def _measure(rows: Params, sent: Params) -> LayerMeasures:
    first = next(iter(rows.values()))
    squares = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    dots, sent_squares = squares.clone(), squares.clone()
    is_sent = rows.keys() <= sent.keys()
    for name, value in rows.items():
        uploaded = flatten(value)
        # Without a model that was sent, the others' models tell what is usual.
        before = flatten(sent[name]) if is_sent else uploaded.median(0).values.expand_as(uploaded)
        update = uploaded - before
        if before.stride(0) == 0:
            dots += torch.mv(update, before[0])
            sent_squares += torch.linalg.vector_norm(before[0]).square()
        else:
            dots += torch.einsum("cp,cp->c", update, before)
            sent_squares += torch.linalg.vector_norm(before, dim=1).square()
        squares += torch.linalg.vector_norm(update, dim=1).square()
    return LayerMeasures(list(rows), squares, sent_squares, 1 + dots / sent_squares.clamp_min(1e-30))


def sample_updates(upload: Params, sent: Params, seed: int) -> Tensor:
    """Return sampled values of the updates (C, V), each tensor with about the weight of all its values.

    The same `seed` takes the same values of other uploads.
    """
    columns = []
    for name, value in upload.items():
        size = value[0].numel()
        step = -(-size // MAX_SAMPLED_VALUES)
        update = flatten(value)[:, seed % step :: step] - flatten(sent[name])[:, seed % step :: step]
        columns.append(update.double() * (size / max(1, update.shape[1])) ** 0.5)
    return torch.cat(columns, 1)
