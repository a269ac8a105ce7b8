"""Samples divided among clients, each client with its own training, validation and test part.

A server that sees no data has `FederationInfo` instead: the clients' names and numbers of samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.metrics import MetricName
from ..core.targets import TargetKind, find_info_kind, find_kind
from .augmentation import move_images
from .client_index import PARTS, Client, ClientIndex, Part, RaggedIndex, hash_clients
from .dataset import Dataset, scale_target
from .on_disk import RowsOnDisk, hash_samples
from .schema import Schema, describe_target, make_schema
from .types import Array, Index, TargetScale


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All samples, kept once, and the N clients as index lists into them.

    The model's input is `(x - shift) * scale`, or x itself if it is int64.

    Args:
        name: name of the data.
        x: samples (n, *shape), uint8, int64 (such as token numbers) or float32; or such rows that stay in files.
        y: class numbers (n,), int64; or, if the target is a number, (value - mean) / deviation, float32; or L labels
            (n, L), bool, M such numbers (n, M), float32, or class numbers of positions (n, *positions), int64, where
            -100 does not count.
        classes: names of the classes; empty for labels and numbers.
        clients: the clients, kept as a `ClientIndex`.
        shift: subtracted from the samples, float32, broadcastable to one sample.
        scale: multiplied with the shifted samples, likewise.
        partition: how the data were divided: name, options, number of clients, seed, fractions.
        notes: sentences for the user.
        source: fingerprint of the data before features were fitted per client; empty for the fingerprint of x, y.
        schema: columns and categories of a table.
        preparation: by the client's name, the constants (3, K) that prepare the client's rows of a table.
        target_scale: mean and deviation of a target that is a number, or several.
        groups: group of each sample, (n,), whose samples share a part; None without groups.
        labels: names of the labels of a target that has several.
        outputs: names of the numbers of a target that has several.

    Raises:
        DataError: no clients, names that repeat, indices out of range, or a sample in two parts of a client.
    """

    name: str
    x: Tensor | RowsOnDisk
    y: Tensor
    classes: tuple[str, ...]
    clients: Sequence[Client]
    shift: Tensor | None = None
    scale: Tensor | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""
    schema: Schema | None = None
    preparation: Mapping[str, Array] = field(default_factory=dict)
    target_scale: TargetScale | None = None
    groups: Array | None = None
    labels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        index = ClientIndex.from_clients(self.clients)
        index.check(self.name, len(self.y))
        object.__setattr__(self, "clients", index)

    @property
    def index(self) -> ClientIndex:
        """The clients as index lists."""
        return cast(ClientIndex, self.clients)

    def __repr__(self) -> str:
        about = f"{self.n_clients} clients, {len(self.y)} samples, {self.describe_target()}"
        return f"Federation({self.name!r}, {about})"

    @property
    def kind(self) -> TargetKind:
        """Kind of the target: "class", "number", "labels", "numbers" or "positions"."""
        return find_kind(self.y)

    def describe_target(self) -> str:
        """Say what is predicted: 10 classes, a number to predict."""
        if self.kind == "positions":
            return f"{self.n_classes} classes at positions {tuple(self.y.shape[1:])}"
        if self.classes:
            return f"{self.n_classes} classes"
        if self.labels:
            return f"{len(self.labels)} labels"
        return f"{len(self.outputs)} numbers to predict" if self.outputs else "a number to predict"

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.clients)

    @property
    def n_classes(self) -> int:
        """Number of classes; 0 for labels and numbers."""
        return len(self.classes)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of a model: one per class or label, or the predicted numbers."""
        return len(self.classes or self.labels or self.outputs) or 1

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one sample: (n_outputs,), or (n_outputs, *positions)."""
        return (self.n_outputs, *self.y.shape[1:]) if self.kind == "positions" else (self.n_outputs,)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients."""
        return self.index.names

    @property
    def device(self) -> torch.device:
        """Device of the samples."""
        return self.y.device

    def part(self, part: Part) -> RaggedIndex:
        """Return each client's indices of one part."""
        if part not in PARTS:
            raise ConfigError(f"unknown part {part!r}; {did_you_mean(part, PARTS)}")
        return self.index.parts[part]

    def sizes(self, part: Part) -> Tensor:
        """Return each client's number of samples in one part, int64 (N,). Do not write to it."""
        return torch.from_numpy(self.part(part).sizes)

    def label_counts(self, part: Part | None = None) -> Array:
        """Count each client's samples of each class in one part or in all, int64 (N, classes).

        Of several labels, count the samples that have each label; where positions have classes, count positions.
        Numbers have no columns.
        """
        if not self.n_labels:
            return np.zeros((self.n_clients, 0), dtype=np.int64)
        if self.kind != "class":
            return self._count_parts(part)
        y, k = self.y.cpu().numpy(), self.n_classes
        parts = [self.part(p) for p in PARTS] if part is None else [self.part(part)]
        counts = np.zeros((self.n_clients, k), dtype=np.int64)
        for start, stop in self.index.chunks():
            for lists in parts:
                cells = (lists.client_numbers(start, stop) - start) * k + y[lists.rows_between(start, stop)]
                counts[start:stop] += np.bincount(cells, minlength=(stop - start) * k).reshape(-1, k)
        return counts

    @property
    def n_labels(self) -> int:
        """Number of columns of `label_counts`: classes, or labels of a target that has several."""
        return len(self.classes or self.labels)

    def _count_parts(self, part: Part | None) -> Array:
        y = self.y.flatten(1).cpu().numpy()
        rows = [client.all if part is None else getattr(client, part) for client in self.index]
        if self.kind == "labels":
            return np.stack([y[mine].sum(axis=0) for mine in rows])
        return np.stack([np.bincount(y[mine][y[mine] >= 0], minlength=self.n_classes) for mine in rows])

    def features(self, index: Tensor, dtype: torch.dtype = torch.float32, moves: Tensor | None = None) -> Tensor:
        """Return the model's input for the samples `index` of any shape: (*index.shape, *input_shape).

        It is of the given floating-point type; samples that are int64 stay int64. `moves`, of the shape of `index`,
        change images; see `fedattune.data.augmentation`.
        """
        x, shift, scale = self.samples(dtype)
        if isinstance(x, RowsOnDisk):
            x, index = x.read(index), torch.arange(index.numel(), device=index.device).view_as(index)
        return gather(x, index, shift, scale, dtype, moves)

    def samples(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor | RowsOnDisk, Tensor | None, Tensor | None]:
        """Return all samples as they are kept, and shift and scale in `dtype`."""
        shift, scale = (None if a is None else a.to(dtype) for a in (self.shift, self.scale))
        return self.x, shift, scale

    def to(self, device: torch.device | str) -> "Federation":
        """Return the federation with its samples on `device`; samples in files stay there."""
        if self.device == torch.device(device):
            return self
        tensors = {name: getattr(self, name) for name in ("x", "y", "shift", "scale")}
        moved: dict[str, Any] = {name: one.to(device) for name, one in tensors.items() if isinstance(one, Tensor)}
        return replace(self, **moved)

    def stored(self, rows: Tensor) -> Tensor:
        """Return the samples with some numbers (m,) as they are kept: (m, *input_shape)."""
        return self.x.read(rows) if isinstance(self.x, RowsOnDisk) else self.x[rows]

    def all_stored(self, why: str) -> Tensor:
        """Return all samples as they are kept, for something that needs them in memory.

        Raises:
            ConfigError: they stay in files; `why` names what needs them.
        """
        if isinstance(self.x, RowsOnDisk):
            raise ConfigError(
                f"{self.name}: {why} needs all samples in memory, and they stay in files; load them with np.load "
                "without mmap_mode, or leave it out"
            )
        return self.x

    def rescale(self, constants: Array | None = None) -> "Federation":
        """Return the federation with the numbers of its table standardised by the same constants for all clients.

        Models of pooled rows need that, because clients that scale their numbers alone hide how they differ; so do
        newcomers of a run whose clients shared their constants.

        Args:
            constants: median, mean and deviation of K columns, (3, K); by default those of all training rows.

        Returns:
            The same federation if it is no table, or if the clients have these constants already.

        Raises:
            DataError: the constants are of another number of columns.
        """
        own = [self.preparation[name] for name in self.names if name in self.preparation]
        if len(own) < self.n_clients:
            return self
        common = own[0] if constants is None else constants
        if common.shape != own[0].shape:
            raise DataError(
                f"{self.name}: got constants of {common.shape[1]} columns for a table with {own[0].shape[1]} columns "
                "of numbers; take a table with the columns of the run"
            )
        if all(np.array_equal(one, common, equal_nan=True) for one in own):
            return self
        from .tables.scaling import fit_all_constants, limit, standardise, undo_scaling

        train, rows = ([getattr(client, part) for client in self.index] for part in ("train", "all"))
        x = self.all_stored("the scaling of a table").cpu().numpy()
        raw = undo_scaling(x, own, rows)
        constants = fit_all_constants(raw, train, "federated")[0][0] if constants is None else constants
        scaled = np.concatenate([limit(standardise(raw, constants)), x[:, raw.shape[1] :]], axis=1)
        return replace(
            self, x=torch.from_numpy(scaled).to(self.device), preparation=dict.fromkeys(self.names, constants)
        )

    def manifest(self) -> dict[str, Any]:
        """Return the values of the manifest, which says which client has which samples; `hash` covers the rest."""
        return dict(json.loads("".join(self.iter_manifest())))

    def iter_manifest(self) -> Iterator[str]:
        """Yield the JSON of the manifest in pieces, because the manifest of many clients is larger than the data."""
        head = {"hash": self.digest, "data": self._about, "partition": dict(self.partition)}
        yield json.dumps(head).removesuffix("}") + ', "clients": ['
        for i, client in enumerate(self.clients):
            lists: dict[str, list[int]] = {part: getattr(client, part).tolist() for part in PARTS}
            yield ", " * (i > 0) + json.dumps({"name": client.name, **lists})
        yield "]}"

    @cached_property
    def digest(self) -> str:
        """The manifest's `hash`."""
        return hash_clients(self._about, dict(self.partition), self.index)

    @cached_property
    def _about(self) -> dict[str, Any]:
        """The manifest's entry `data`."""
        fingerprint = self.source or hash_samples(self.x, self.y.cpu().numpy())
        return {"name": self.name, "n": len(self.y), "fingerprint": fingerprint}

    def heterogeneity(self) -> dict[str, float]:
        """Measure how unlike the clients are: their sizes, their numbers of classes, and their label distributions.

        Of a target that is a number, `target_distance` is the root mean square distance of the clients' means from the
        mean of all, in deviations of the target; of several numbers, the mean over them. Of labels, `label_distance` is
        the mean difference between the share of a label at a client and at all.

        `label_distance` is the mean total variation distance between a client's label distribution and the
        distribution of all samples (0: all alike, towards 1: nothing in common). `label_distance_pairs` is the
        mean distance between two clients.
        """
        n = self.n_clients
        if not self.classes:
            y = self.y.cpu().numpy()
            every = [y[client.all] for client in self.index]
            means, whole = np.array([mine.mean(axis=0) for mine in every]), np.concatenate(every)
            about = {"clients": n, **_summarize("samples", np.array([*map(len, every)]))}
            if self.labels:
                return {**about, "label_distance": float(np.abs(means - whole.mean(axis=0)).mean())}
            distances = np.sqrt(((means - whole.mean(axis=0)) ** 2).mean(axis=0)) / np.maximum(whole.std(axis=0), 1e-12)
            return {**about, "target_distance": float(distances.mean())}
        counts = self.label_counts()
        sizes, has_positions = counts.sum(axis=1), self.kind == "positions"
        shares = counts / np.maximum(sizes, 1)[:, None]
        pooled = counts.sum(axis=0) / max(int(sizes.sum()), 1)
        # In sorted order, each share is subtracted once per larger share: this needs no N x N distances.
        ranks = 2 * np.arange(n) - n + 1
        pairs = float(ranks @ np.sort(shares, axis=0).sum(axis=1)) / max(n * (n - 1), 1)
        return {
            "clients": n,
            **_summarize("samples", np.array([len(client.all) for client in self.index]) if has_positions else sizes),
            **_summarize("classes", (counts > 0).sum(axis=1)),
            "label_distance": float(np.abs(shares - pooled).sum(axis=1).mean() / 2),
            "label_distance_pairs": max(0.0, pairs),
        }


def _summarize(name: str, values: Array) -> dict[str, float]:
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return {f"{name}_min": low, f"{name}_median": middle, f"{name}_max": high}


def infer_schema(data: Dataset | Federation) -> Schema:
    """Return the schema of data at hand: the columns of a table, or else shape, classes and scaling.

    Raises:
        ConfigError: two classes have one name, or there is a single class.
    """
    if data.schema is not None:
        return data.schema
    scaling = {key: one.tolist() for key in ("shift", "scale") if (one := getattr(data, key)) is not None}
    if "int64" in str(data.x.dtype):
        scaling["input_type"] = "int64"
    if not data.classes:
        scaling |= describe_target(getattr(data, "target_scale", None))
    names = {"classes": data.classes, "labels": data.labels, "outputs": data.outputs}
    values = {**names, "input_shape": tuple(data.x.shape[1:]), **scaling}
    if data.kind == "positions":
        values["positions"] = tuple(data.y.shape[1:])
    return make_schema(values, f"the schema of {data.name}")


IMBALANCED_SHARE = 0.75
"""Share of one class above which accuracy says little, so that another metric is the default."""
MIN_AUC_CLIENTS = 6
"""Clients with test rows of several classes above which their mean AUC says enough."""


def choose_metric(federation: Federation) -> MetricName:
    """Choose the metric of a verdict by the target: RMSE of a number, accuracy of classes of about equal size.

    Where one class has most rows: AUC if the test parts of enough clients have two classes or more, else balanced
    accuracy. Clients with test rows of one class have no AUC; their balanced accuracy would be 0 or 1 by that class
    alone.
    """
    if federation.kind in ("labels", "positions"):
        return _choose_share_metric(federation)
    if not federation.classes:
        return "rmse"
    totals = federation.label_counts().sum(axis=0)
    if totals.max() < IMBALANCED_SHARE * totals.sum():
        return "accuracy"
    has_several = (federation.label_counts("test") > 0).sum(axis=1) > 1
    is_defined = has_several.mean() > 0.5 or has_several.sum() >= MIN_AUC_CLIENTS
    return "auc" if is_defined else "balanced_accuracy"


def _choose_share_metric(federation: Federation) -> MetricName:
    """Choose the share of right labels or positions, or where most of them are alike, micro F1 or mean IoU."""
    if federation.kind == "labels":
        share = float(federation.y.double().mean())
        return "label_accuracy" if 1 - IMBALANCED_SHARE < share < IMBALANCED_SHARE else "micro_f1"
    totals = federation.label_counts().sum(axis=0)
    return "position_accuracy" if totals.max() < IMBALANCED_SHARE * totals.sum() else "mean_iou"


@dataclass(frozen=True)
class FederationInfo:
    """Facts that a server knows of clients whose data it never sees. It takes the place of a `Federation`.

    `counts` has each client's number of samples by part, (N, 3), in the order of `PARTS`.
    """

    name: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    partition: Mapping[str, Any] = field(default_factory=lambda: {"name": "given"})
    target_scale: TargetScale | None = None
    labels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def kind(self) -> TargetKind:
        return find_info_kind(self.classes, self.labels, self.outputs)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (len(self.classes or self.labels or self.outputs) or 1,)

    @property
    def n_clients(self) -> int:
        return len(self.names)

    def sizes(self, part: Part) -> Tensor:
        column = PARTS.index(part)
        return torch.tensor([row[column] for row in self.counts], dtype=torch.int64)

    def to(self, device: torch.device | str) -> "FederationInfo":
        """Return itself: there is nothing to move."""
        return self


def gather(
    x: Tensor,
    index: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    moves: Tensor | None = None,
) -> Tensor:
    """Return `(x - shift) * scale` of some samples, (*index.shape, *shape), in a floating-point type.

    Samples that are int64 stay as they are. TorchScript can compile this function.
    """
    chosen = x.index_select(0, index.reshape(-1))
    if moves is not None:  # before shift and scale, so that the padding is black
        chosen = move_images(chosen, moves.reshape(-1))
    if x.dtype == torch.int64:
        return chosen.view(index.size() + x.size()[1:])
    samples = chosen.to(dtype)
    if shift is not None:
        samples.sub_(shift)
    if scale is not None:
        samples.mul_(scale)
    return samples.view(index.size() + x.size()[1:])


def combine_federations(name: str, pieces: Sequence[Federation]) -> Federation:
    """Put all clients of some federations into one federation, in this order."""
    first = pieces[0]
    if len(pieces) == 1:
        return replace(first, name=name)
    first_schema = infer_schema(first)
    for piece in pieces:
        schema = infer_schema(piece)
        if schema != first_schema or piece.x.dtype != first.x.dtype:
            where = [key for key in Schema.model_fields if getattr(schema, key) != getattr(first_schema, key)]
            raise DataError(
                f"{name}: client {piece.names[0]!r} differs from client {first.names[0]!r} in "
                f"{' and '.join(where) or 'the type of its samples'}; all clients of a node need data of one schema"
            )
    starts = np.cumsum([0, *(len(piece.y) for piece in pieces)]).tolist()
    return replace(
        first,
        name=name,
        x=torch.cat([piece.all_stored("a node of several federations") for piece in pieces]),
        y=torch.cat([piece.y for piece in pieces]),
        clients=[
            Client(client.name, *(getattr(client, part) + start for part in PARTS))
            for piece, start in zip(pieces, starts, strict=False)
            for client in piece.clients
        ],
        partition={**first.partition, "clients": sum(piece.n_clients for piece in pieces)},
        notes=tuple(dict.fromkeys(note for piece in pieces for note in piece.notes)),
        source="",
        preparation={name: constants for piece in pieces for name, constants in piece.preparation.items()},
    )


def select_clients(federation: Federation, numbers: Index) -> Federation:
    """Return the federation of some clients (M,), in this order, without any other client's samples."""
    clients = federation.index.take(numbers)
    rows = np.unique(np.concatenate([lists.flat for lists in clients.parts.values()])).astype(np.int64)
    index = torch.from_numpy(rows).to(federation.device)
    return replace(
        federation,
        x=federation.x.select(index) if isinstance(federation.x, RowsOnDisk) else federation.x[index],
        y=federation.y[index],
        clients=clients.change(
            lambda lists: RaggedIndex(np.searchsorted(rows, lists.flat), lists.bounds), clients.names
        ),
        source="",
        # The constants of other clients would tell about the other clients' numbers.
        preparation={name: federation.preparation[name] for name in clients.names if name in federation.preparation},
    )


def select_samples(federation: Federation, members: Index) -> Federation:
    """Return the federation with the samples of clients `members` (M,) alone; other clients are empty.

    Names and constants are left out, because training needs none.
    """
    inside = select_clients(federation.to("cpu"), members)
    return renumber_clients(replace(inside, preparation={}), members, federation.n_clients)


def renumber_clients(federation: Federation, members: Index, n_clients: int) -> Federation:
    """Give the clients the sorted numbers `members` (M,) in a larger federation, where all other clients are empty."""

    def renumber(lists: RaggedIndex) -> RaggedIndex:
        sizes = np.zeros(n_clients, dtype=np.int64)
        sizes[members] = lists.sizes
        return RaggedIndex(lists.flat, np.concatenate([[0], sizes.cumsum()]))

    return replace(federation, clients=federation.index.change(renumber, None))


def rescale_target(federation: Federation, scale: TargetScale) -> Federation:
    """Return the federation with its target, a number or several, in deviations of another scale."""
    own = federation.target_scale
    if own is None or own == scale:
        return federation
    mean, deviation, new_mean, new_deviation = (
        torch.tensor(one, dtype=torch.float64, device=federation.device) for one in (*own, *scale)
    )
    y = (federation.y.double() * deviation + mean - new_mean) / new_deviation
    return replace(federation, y=y.float(), target_scale=scale)


def share_target_scale(pieces: Sequence[Federation], scale: TargetScale | None) -> list[Federation]:
    """Return federations whose target, a number or several, is in deviations of one scale.

    By default, this is the scale of all their training rows.
    """
    own = [piece.target_scale for piece in pieces]
    if len(pieces) < 2 or any(one is None for one in own):
        return list(pieces)
    if scale is None:
        values = [one.restore(piece.y.double().cpu().numpy()) for piece, one in zip(pieces, own, strict=True) if one]
        starts = np.cumsum([0, *map(len, values)]).tolist()
        train = [client.train + start for piece, start in zip(pieces, starts, strict=False) for client in piece.clients]
        _, scale = scale_target(np.concatenate(values), train)
    about = describe_target(scale)
    return [
        replace(rescale_target(one, scale), schema=one.schema and one.schema.model_copy(update=about)) for one in pieces
    ]


def fit_to_schema(federation: Federation, schema: Schema, where: str) -> Federation:
    """Check a federation against the schema that all nodes share.

    Shift and scale are the schema's where the data have none, and a target that is a number is in its deviations.
    """
    schema.check(infer_schema(federation), where)
    own, common = federation.target_scale, schema.target_scale
    if own is not None and own != common:
        if common is None:
            raise DataError(
                f"{where}: the target is a number, but the schema has no target_mean and target_deviation, which all "
                "nodes must share; add them to the schema"
            )
        federation = rescale_target(federation, common)
    if federation.shift is None and federation.scale is None:
        shift, scale = schema.scaling()
        federation = replace(federation, shift=shift, scale=scale)
    return replace(federation, schema=schema)
