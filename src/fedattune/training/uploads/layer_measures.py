"""Measure the updates of a round, layer by layer: norm, share of the sent layer, and direction."""

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.params import Params, find_layer
from ...core.payload import Payload
from ...server.products import flatten

MIN_VALUES, MAX_SAMPLED_VALUES = 500, 1024
"""Values of a layer that the rule on directions needs, and compares: few values point anywhere by chance."""


class LayerMeasures(NamedTuple):
    """Measures of one layer, for C clients.

    Attributes:
        squares: (C,) squared norm of the update.
        sent_squares: (C,) squared norm of the layer that was sent, or in place of it the median of the uploads.
        shares: (C,) share of that layer that the upload keeps.
        sample: (C, P) some values of the update, for its direction; no values if it does not matter.
    """

    squares: Tensor
    sent_squares: Tensor
    shares: Tensor
    sample: Tensor


def measure_layers(
    upload: Payload, sent: Payload, r: int | None, disagreeing: Container[str] = (), *, are_models_sent: bool
) -> dict[str, LayerMeasures]:
    """Measure every layer of the uploads of round `r`, which chooses the sampled values; None: no directions."""
    before = sent.params if are_models_sent else Params()
    layers: dict[str, list[str]] = {}
    for name in upload.params:
        layers.setdefault(find_layer(name), []).append(name)
    return {
        layer: _measure(upload.params.only(names), before, None if layer in disagreeing else r)
        for layer, names in layers.items()
    }


def _measure(rows: Params, sent: Params, r: int | None) -> LayerMeasures:
    """Measure the tensors of a layer; without `r`, without a sample."""
    first = next(iter(rows.values()))
    squares = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    dots, sent_squares, samples = squares.clone(), squares.clone(), []
    is_sent = rows.keys() <= sent.keys()
    size = sum(value[0].numel() for value in rows.values())
    step = -(-size // MAX_SAMPLED_VALUES)
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
        if is_sent and r is not None and size >= MIN_VALUES:
            samples.append(update[:, r % step :: step])
        squares += torch.linalg.vector_norm(update, dim=1).square()
    sample = torch.cat(samples, 1) if samples else first.new_empty(len(first), 0)
    return LayerMeasures(squares, sent_squares, 1 + dots / sent_squares.clamp_min(1e-30), sample)


def compare_directions(updates: Tensor, voters: list[int]) -> Tensor:
    """Return the cosine (C,) of each update (C, P) with the lower median of the other voters' values."""
    ordered = updates[voters].sort(0).values
    k = len(ordered)
    below = (k - 2) // 2  # position of the median of k - 1 values
    is_voter = torch.zeros(len(updates), 1, dtype=torch.bool, device=updates.device)
    is_voter[voters] = True
    # Without a value at or below that position, the next one is the median.
    others = torch.where(updates <= ordered[below], ordered[below + 1], ordered[below])
    medians = torch.where(is_voter, others, ordered[(k - 1) // 2])
    return torch.nn.functional.cosine_similarity(updates, medians, dim=1, eps=1e-30).double()
