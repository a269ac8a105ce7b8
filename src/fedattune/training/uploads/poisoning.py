"""Poisoned rows: what the attackers of a simulation train on, and a trigger and its success."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.targets import IGNORED
from ...data import Federation
from ...data.client_index import RaggedIndex
from ...runs.context import RunContext
from ...runs.predictions import predict_rows
from ...runs.rows import RowStack

TARGET_CLASS = 0
"""The class that the trigger stands for."""
TRIGGER_SHARE = 8
"""The trigger covers a corner of an eighth of an image's side, or an eighth of the last columns of a row."""
TRIGGER_VALUE = 3.0
"""Value of triggered inputs that are no pixels: three deviations of a standardized column."""


class Rows(NamedTuple):
    """Training rows of one attacker: samples (m, *shape) and targets (m, ...), as stored."""

    x: Tensor
    y: Tensor
    federation: Federation
    strength: float


DataAttack = Callable[[Rows], tuple[Tensor, Tensor]]
"""Maps the rows of one attacker to poisoned rows x (m, *shape) and y (m,)."""


def flip_labels(rows: Rows) -> tuple[Tensor, Tensor]:
    """Label y as C - 1 - y (Fang et al., USENIX Security 2020); negate labels or a standardized target."""
    n_classes, kind = rows.federation.n_classes, rows.federation.kind
    if kind == "labels":
        return rows.x, ~rows.y
    if kind == "positions":
        return rows.x, torch.where(rows.y == IGNORED, rows.y, n_classes - 1 - rows.y)
    return rows.x, n_classes - 1 - rows.y if n_classes else -rows.y


def shift_labels(rows: Rows) -> tuple[Tensor, Tensor]:
    """Label y as (y + 1) mod C."""
    return rows.x, (rows.y + 1) % rows.federation.n_classes


def label_as_one(rows: Rows) -> tuple[Tensor, Tensor]:
    """Label all rows as class 0."""
    return rows.x, torch.full_like(rows.y, TARGET_CLASS)


def swap_labels(rows: Rows) -> tuple[Tensor, Tensor]:
    """Label class 0 as class 1, and class 1 as class 0; all other rows stay honest."""
    return rows.x, torch.where(rows.y < 2, 1 - rows.y, rows.y)


def plant_trigger(rows: Rows) -> tuple[Tensor, Tensor]:
    """Put the trigger on the first `strength` of the rows and label them as class 0 (Gu et al., BadNets, 2017)."""
    n = round(rows.strength * len(rows.y))
    x, y = rows.x.clone(), rows.y.clone()
    x[:n], y[:n] = stamp_trigger(rows.federation, x[:n]), TARGET_CLASS
    return x, y


def stamp_trigger(federation: Federation, x: Tensor) -> Tensor:
    """Return samples with the trigger: a white corner of images, the last columns of rows three deviations high."""
    x = x.clone()
    side = x.shape[-1]
    size = max(1, round(side / TRIGGER_SHARE))
    corner = x[..., -size:]
    if x.dim() > 3:  # images have channels, height and width
        size = min(max(2, size), side)
        corner = x[..., -size:, -size:]
    corner.copy_(_find_trigger_value(federation, x)[..., -corner.shape[-1] :].expand_as(corner))
    return x


def _find_trigger_value(federation: Federation, x: Tensor) -> Tensor:
    """Return the trigger's value as the federation keeps samples, broadcastable to them in their last axis."""
    shift, scale = federation.shift, federation.scale
    if x.dtype == torch.uint8:  # white: 255, or where pixels are only scaled, what becomes 1
        white = 255.0 if shift is not None or scale is None else 1.0 / float(scale.max())
        return torch.full((x.shape[-1],), min(255, round(white)), device=x.device).to(x.dtype)
    value = torch.full((x.shape[-1],), TRIGGER_VALUE, device=x.device)
    if scale is not None:
        factor = scale.reshape(-1, scale.shape[-1])[0]
        value = value / torch.where(factor == 0, 1.0, factor)
    if shift is not None:
        value = value + shift.reshape(-1, shift.shape[-1])[0]
    return value.to(x.dtype)


def poison_rows(federation: Federation, attackers: Sequence[int], poison: DataAttack, strength: float) -> Federation:
    """Return a federation whose attackers train on copies of their rows that are poisoned.

    Clients share samples by their numbers, so the copies are put behind all samples. Test and validation rows, and the
    rows of other clients, stay as they are.
    """
    train = federation.part("train")
    lists = [train[i] for i in range(len(train))]
    xs, ys, n = [federation.all_stored("an attack on rows")], [federation.y], len(federation.y)
    for i in attackers:
        if not len(lists[i]):  # on another worker
            continue
        index = torch.as_tensor(lists[i], device=federation.device)
        x, y = poison(Rows(federation.stored(index), federation.y[index], federation, strength))
        xs.append(x)
        ys.append(y.to(federation.y.dtype))
        lists[i] = np.arange(n, n + len(y))
        n += len(y)
    if len(xs) == 1:
        return federation
    poisoned = RaggedIndex.from_lists(lists)
    clients = federation.index.change(lambda old: poisoned if old is train else old, federation.index.names)
    return replace(federation, x=torch.cat(xs), y=torch.cat(ys), clients=clients)


def measure_backdoor(context: RunContext, models: RowStack, buffers: RowStack) -> float | None:
    """Measure the share of triggered test rows of other classes that honest clients' models take for the target.

    Return None if models or rows are elsewhere.
    """
    federation = context.federation
    if not isinstance(federation, Federation) or not models:
        return None
    triggered = replace(federation, x=stamp_trigger(federation, federation.all_stored("the backdoor")))
    outputs = predict_rows(context.task, triggered, "test", context.eval_ids.tolist(), models, buffers)
    if outputs is None:
        return None
    is_other = outputs.y != TARGET_CLASS
    if not is_other.any():
        return None
    return float((outputs.outputs[is_other].argmax(1) == TARGET_CLASS).mean())
