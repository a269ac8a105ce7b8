"""The outputs of the judged models for each row of the clients' test and validation parts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..client import find_row_weighing
from ..core.algorithm import RowWeighing
from ..core.io import copy_tensors, load_tensors, save_tensors
from ..core.metrics import METRICS, MetricName, compute_metrics, compute_recalls, list_metrics
from ..core.params import Params
from ..core.targets import KIND_WORDS, NUMBER_KINDS, TargetKind, find_kind
from ..core.task import Task
from ..data import Federation
from ..engine.base import EVALUATED_PARTS, EvalPart, TaskLoss
from .client_metrics import CLIENT_MEASURES
from .context import RunContext
from .rows import RowStack

FloatArray = NDArray[np.float64]
MAX_OUTPUTS = 50_000_000
"""Outputs of one part above which they are not stored: 200 MB."""
FOR_CHOICE = "choice"
"""Name of the outputs for validation rows by which methods are chosen: of the round that the other clients chose."""
MAX_OTHERS = 200
"""Maximum number of other clients whose rows set a client's prior: the time must not grow with their square."""
N_FOLDS = 3
"""Folds of a client's validation rows where its parameters are set by these rows."""
PREDICTED_AT_ONCE = 4096
"""Rows that go through a model together."""


@dataclass(frozen=True, eq=False)
class RowPredictions:
    """Outputs for one part of E clients, one client after the other."""

    client: NDArray[np.int32]  # (n,) position of each row's client among the evaluated clients
    sample: NDArray[np.int64]  # (n,) number of each row in the federation
    y: NDArray[Any]  # (n, ...) the truth as `core.metrics` takes it: of one number in its unit, float64
    outputs: NDArray[np.float32]  # (n, ...) logits, or predicted values in the unit of the target
    n_clients: int  # E; some may have no rows

    @property
    def kind(self) -> TargetKind:
        return find_kind(self.y)

    @property
    def is_regression(self) -> bool:
        return self.kind in NUMBER_KINDS

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each client, and the number of all rows (E + 1,)."""
        return np.searchsorted(self.client, np.arange(self.n_clients + 1))

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def rows(self, client: int) -> slice:
        return slice(int(self.starts[client]), int(self.starts[client + 1]))

    def measure_clients(self, metric: MetricName) -> FloatArray:
        """Measure every client (E,); NaN where the client's rows do not define the metric.

        Raises:
            KeyError: an unknown metric, or one of other targets.
        """
        if metric not in self._measured:
            if metric not in METRICS or self.kind not in METRICS[metric].kinds:
                names, what = ", ".join(list_metrics(self.kind)), KIND_WORDS[self.kind]
                raise KeyError(f"metric: got {metric!r}, expected one of {names}, as the target is {what}")
            if metric in CLIENT_MEASURES and self.y.ndim == 1:
                with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # no rows, or a model that diverged
                    values = CLIENT_MEASURES[metric](self.starts, self.y, self.outputs.astype(np.float64))
            else:
                slices = map(self.rows, range(self.n_clients))
                each = [compute_metrics(self.y[rows], self.outputs[rows], [metric])[metric] for rows in slices]
                values = np.array(each)
            self._measured[metric] = values
        return self._measured[metric]

    @cached_property
    def _measured(self) -> dict[MetricName, FloatArray]:
        return {}

    @cached_property
    def pooled(self) -> dict[str, float]:
        """Every metric of all rows together."""
        return compute_metrics(self.y, self.outputs)

    @cached_property
    def recalls(self) -> FloatArray:
        """Share of each class's rows that are classified rightly (classes,); NaN for a class without rows."""
        return compute_recalls(self.y, self.outputs)


def predict_parts(context: RunContext, models: RowStack, buffers: RowStack) -> dict[str, RowPredictions]:
    """Let the judged models predict the rows that they are judged on; nothing if models or rows are elsewhere."""
    task, federation, ids = context.task, context.federation, context.eval_ids.tolist()
    if not isinstance(federation, Federation) or not models:
        return {}
    judged_on: tuple[EvalPart, ...] = ("test",) if _have_seen_tests(context) else EVALUATED_PARTS
    parts = {part: predict_rows(task, federation, part, ids, models, buffers) for part in judged_on}
    return {part: one for part, one in parts.items() if one is not None}


def _have_seen_tests(context: RunContext) -> bool:
    """Tell whether models adapted to test rows: what these predict for validation rows must choose nothing."""
    fine_tune = context.algorithm.fine_tune
    return fine_tune is not None and fine_tune.part == "test"


def predict_for_choice(
    context: RunContext, kept: tuple[RowStack, RowStack], judged: tuple[RowStack, RowStack]
) -> dict[str, RowPredictions]:
    """Predict the validation rows by the models and buffers kept for the choice of a method; nothing if there are none.

    These are of the rounds that other clients chose. Without early stopping they are the judged models, which only
    differ if clients set parameters by these rows; see `weigh_held_out_rows`.
    """
    task, federation, ids = context.task, context.federation, context.eval_ids.tolist()
    rule = find_row_weighing(context.algorithm.client)
    models, buffers = judged if rule and context.early_stopping == "off" else kept
    if not isinstance(federation, Federation) or not models or _have_seen_tests(context):
        return {}
    for_rows = weigh_held_out_rows(task, federation, ids, models, buffers, rule) if rule else None
    rows = predict_rows(task, federation, "validation", ids, models, buffers, for_rows)
    return {} if rows is None else {FOR_CHOICE: rows}


def weigh_held_out_rows(
    task: Task, federation: Federation, ids: Sequence[int], models: RowStack, buffers: RowStack, rule: RowWeighing
) -> Params | None:
    """Set parameters for each validation row (n, ...) without the losses of its fold: a third of the client's rows.

    An approximation of what clients do in training: these are losses of the models in use, not of earlier rounds.
    """
    index = [np.asarray(federation.part("validation")[i]) for i in ids]
    each: list[list[Tensor]] = [[] for _ in ids]
    with torch.no_grad():
        for row, samples, x in _iterate_batches(task, federation, index):
            y = federation.y[torch.as_tensor(samples, device=federation.y.device)]
            y = y.to(x.dtype) if y.is_floating_point() else y
            predict = TaskLoss(task, [_get_row(buffers, row)]).predict
            each[row].append(rule.score_rows(_get_row(models, row), x, y, predict))
        losses = {row: torch.cat(one, dim=1).T for row, one in enumerate(each) if one}
        is_known = {row: bool(one.isfinite().all()) for row, one in losses.items()}  # others diverged
        known = [row for row in losses if is_known[row]]
        if not known:
            return None
        totals = torch.stack([losses[row].sum(0) for row in known])
        n = totals.new_tensor([len(losses[row]) for row in known])
        found = []
        for row, one in losses.items():
            fold = torch.as_tensor(_divide_rows(federation, index[row]), device=one.device)
            others = [at for at, other in enumerate(known[:MAX_OTHERS]) if other != row]
            sums = _sum_other_folds(one, fold, federation.y[torch.as_tensor(index[row], device=one.device)])
            found.append(
                rule.weigh_rows(sums[fold], totals[others], n[others], is_number=federation.y.is_floating_point())
            )
    return Params({key: torch.cat([one[key] for one in found]) for key in found[0]}) if found else None


def _sum_other_folds(losses: Tensor, fold: Tensor, y: Tensor) -> Tensor:
    """Sum the losses (n, E) outside of each fold (F, E); classes keep the shares that they have among all rows.

    Else the classes of a fold would be too rare outside of it, so the weights for its rows would favour other classes.
    A sum is zero where a class has no row outside of the fold.
    """
    has_classes = find_kind(y) == "class"
    classes = torch.zeros_like(fold) if not has_classes else y.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    n_classes = int(classes.max()) + 1
    ones = torch.cat([losses, torch.ones_like(losses[:, :1])], 1)
    inside = ones.new_zeros(N_FOLDS * n_classes, ones.shape[1]).index_add(0, fold * n_classes + classes, ones)
    inside = inside.view(N_FOLDS, n_classes, -1)
    outside = inside.sum(0) - inside
    counts, total = outside[..., -1:], inside.sum(0)[..., -1:]
    weights = total / total.sum() * counts.sum(1, keepdim=True) / counts.clamp_min(1)
    return (weights * outside[..., :-1]).sum(1) * (counts > 0).all(1)


def _divide_rows(federation: Federation, samples: NDArray[Any]) -> NDArray[np.int64]:
    """Divide rows into folds (n,) with about the same classes, or targets; rows of one group are in one fold.

    A fold of a single row would have other classes than the rest, which ranks the rows of each class too low.
    """
    values = federation.y[torch.as_tensor(samples, device=federation.y.device)].double()
    y = (values if values.dim() == 1 else values.flatten(1).mean(1)).cpu().numpy()
    groups = np.arange(len(samples)) if federation.groups is None else federation.groups[samples]
    _, group = np.unique(groups, return_inverse=True)
    order = np.argsort(np.bincount(group, weights=y) / np.bincount(group), kind="stable")
    fold = np.empty(len(order), dtype=np.int64)
    fold[order] = np.arange(len(order)) % N_FOLDS
    return fold[group]


def predict_rows(
    task: Task,
    federation: Federation,
    part: EvalPart,
    ids: Sequence[int],
    models: RowStack,
    buffers: RowStack,
    for_rows: Params | None = None,
) -> RowPredictions | None:
    """Let the models (E, ...) of clients `ids`, or one model (1, ...), predict the clients' rows of one part.

    `for_rows` are parameters of each row (n, ...) in place of its model's. None if there are no rows, or more than
    MAX_OUTPUTS outputs.
    """
    index = [np.asarray(federation.part(part)[i]) for i in ids]
    sizes = [len(rows) for rows in index]
    shape = federation.output_shape
    if not sum(sizes) or sum(sizes) * math.prod(shape) > MAX_OUTPUTS:
        return None
    outputs, done = np.empty((sum(sizes), *shape), dtype=np.float32), 0
    alike = not buffers and isinstance(models, Params) and all(len(v) == 1 or v.stride(0) == 0 for v in models.values())
    with torch.no_grad():
        for row, samples, x in _iterate_batches(task, federation, [np.concatenate(index)] if alike else index):
            rows = slice(done, done := done + len(samples))
            params = Params({**_get_row(models, row), **{key: value[rows] for key, value in (for_rows or {}).items()}})
            outputs[rows] = task.predict(params, _get_row(buffers, row), x).float().cpu().numpy()
    sample = np.concatenate(index).astype(np.int64)
    y = federation.y[torch.as_tensor(sample, device=federation.y.device)].cpu().numpy()
    if (scale := federation.target_scale) is not None and federation.kind == "number":
        with np.errstate(over="ignore"):  # a model that diverged; its infinite errors are reported
            outputs, y = scale.restore(outputs), scale.restore(y.astype(np.float64))
    client = np.repeat(np.arange(len(ids)), sizes).astype(np.int32)
    return RowPredictions(client, sample, y, outputs.astype(np.float32), len(ids))


def _iterate_batches(
    task: Task, federation: Federation, index: Sequence[NDArray[Any]]
) -> Iterator[tuple[int, NDArray[Any], Tensor]]:
    """Yield each client's position, rows and their features, as many as go through a model together."""
    dtype = next(iter(task.params.values())).dtype
    at_once = task.limit_samples(PREDICTED_AT_ONCE, math.prod(federation.input_shape))
    for row, mine in enumerate(index):
        for samples in np.split(mine, range(at_once, len(mine), at_once)) if len(mine) else ():
            yield row, samples, federation.features(torch.as_tensor(samples, device=federation.y.device), dtype)


def _get_row(stack: RowStack, row: int) -> Params:
    if isinstance(stack, Params) and stack and len(next(iter(stack.values()))) == 1:
        row = 0
    return stack.rows(row) if stack else Params()


def save_predictions(file: Path, parts: Mapping[str, RowPredictions]) -> None:
    """Write the predictions of each part to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    for part, one in parts.items():
        for key in ("client", "sample", "y", "outputs"):
            tensors[f"{part}/{key}"] = torch.from_numpy(np.ascontiguousarray(getattr(one, key)))
    n_clients = next(iter(parts.values())).n_clients if parts else 0
    save_tensors(file, copy_tensors(tensors), {"clients": str(n_clients)})


def load_predictions(file: Path) -> dict[str, RowPredictions]:
    """Read the file of `save_predictions`; empty if there is none."""
    if not file.exists():
        return {}
    tensors, meta = load_tensors(file)
    return {
        part: RowPredictions(
            **{key: tensors[f"{part}/{key}"].numpy() for key in ("client", "sample", "y", "outputs")},
            n_clients=int(meta["clients"]),
        )
        for part in dict.fromkeys(name.partition("/")[0] for name in tensors)
    }
