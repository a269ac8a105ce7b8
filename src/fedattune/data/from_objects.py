"""A federation from Python objects, one per client."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.targets import NUMBER_KINDS
from .build import partition_dataset
from .client_index import PARTS, Client, ClientIndex
from .dataset import Dataset, describe_target_kind, find_nonfinite_row, scale_target
from .federated import Federation
from .hub_datasets import find_hub_data
from .items import read_torch_dataset, to_array
from .on_disk import RowsOnDisk, hash_samples, join_rows, open_rows
from .sequences import Sequences, describe_padding, find_sequences, join_sequences
from .several_targets import MAX_UNUSED_CLASSES, Encoded, check_targets_differ, encode_several, read_numbers
from .splits import SmallClients, check_fractions, compute_part_sizes, select_usable_clients, split_parts
from .tables.checks import MAX_NUMBER_CLASSES, TargetType
from .types import Array, Index

Samples = Array | RowsOnDisk | Sequences
"""Samples of one part of a client."""
LabelledSamples = tuple[Samples, Array]
"""Samples and labels of one part of a client."""


def federation_from(
    clients: Any,
    *,
    client_column: str | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    target_type: TargetType = "auto",
    targets: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int = 0,
    small_clients: SmallClients = "error",
    min_clients: int = 2,
    name: str = "own data",
) -> Federation:
    """Build a federation from one object per client.

    An object is a pair `(x, y)` of arrays or tensors, or a map-style `torch.utils.data.Dataset` of such items, which is
    read once. Where the user has split the samples already, it is a mapping with such an object for "train" and "test"
    and maybe "validation". Samples are used as they are: (n_i, *shape), uint8, int64 for other whole numbers, or
    float32. Whole numbers reach a model as int64 if it takes them, as `nn.Embedding` does, and else as float32. Samples
    that NumPy maps from a file (`np.load` with `mmap_mode="r"`), or the path of a .npy file, stay in the file: each
    batch reads its rows. A list of tensors of unequal length are sequences, see `pad_sequences`. Targets are (n_i,):
    classes, as text or as whole numbers from 0, or numbers to predict, in their unit.

    Data of the library `datasets` of Hugging Face are one `datasets.Dataset` with a column that names the client of
    each row, or a `datasets.Dataset` per client. Its numbers, names and texts become features as those of a table do; a
    column of images or of arrays must be the only feature.

    Args:
        clients: the objects in a list, or by the client's name; or one `datasets.Dataset`.
        client_column: column of a `datasets.Dataset` that names each row's client.
        target: column of a `datasets.Dataset` to predict; by default its only column of class labels.
        features: columns of a `datasets.Dataset` to predict from; by default all others.
        classes: names of the classes, in their order.
        target_type: "class" or "number"; "auto" takes floating point numbers, and more than 20 different whole numbers
            that do not count classes from 0, as numbers to predict, unless `classes` are given. Of targets of several
            parts, "label" is for labels, "number" for numbers, and "class" for classes of positions.
        targets: names of the labels or numbers of targets that have several.
        names: names of the clients.
        test: fraction of a client's samples for testing, where the user has not split them.
        validation: fraction of a client's training samples for validation, where the user gives none.
        seed: seed of the split.
        small_clients: "error" names clients that are too small in an error, "drop" leaves them out.
        min_clients: minimum number of clients; a single client can only join others.
        name: name of the data.

    Raises:
        ConfigError: impossible fractions, or arguments that do not go together.
        DataError: clients that do not fit together or are too small; the message names the client.

    Examples:
        >>> x, y = torch.arange(80.0).reshape(40, 2), torch.arange(40) % 2
        >>> data = federation_from({"north": (x[:24], y[:24]), "south": (x[24:], y[24:])}, classes=["no", "yes"])
        >>> list(data.names), data.classes, data.sizes("test").tolist()
        (['north', 'south'], ('no', 'yes'), [6, 4])
    """
    check_fractions(test, validation, seed)
    if hub := find_hub_data(clients, client_column, target, features):
        if hub.is_table:
            if (classes, names, targets) != (None, None, None):
                raise ConfigError(
                    "classes, names and targets: a datasets.Dataset of numbers and texts has them in its columns; "
                    "leave them out"
                )
            return partition_dataset(
                hub.read_table(name, target_type),
                partition="by_column",
                test=test,
                validation=validation,
                seed=seed,
                small_clients=small_clients,
                min_clients=min_clients,
            )
        clients, classes = hub.read_clients(), classes or hub.classes
    if isinstance(clients, Mapping):
        names, clients = names or list(clients), list(clients.values())
    if isinstance(clients, torch.utils.data.Dataset):
        raise DataError(
            "got one torch Dataset, expected one per client in a list, such as the parts that "
            "torch.utils.data.random_split returns"
        )
    if not clients:
        raise DataError("no clients; give a list with one (x, y) pair, torch Dataset or mapping per client")
    labels = tuple(str(u) for u in range(len(clients))) if names is None else tuple(map(str, names))
    if len(labels) != len(clients):
        raise DataError(f"{len(clients)} clients but {len(labels)} names; give each client one name")
    client_parts = [_read_parts(label, client) for label, client in zip(labels, clients, strict=True)]
    pieces = [piece for parts in client_parts for piece in parts.values()]
    owners = [label for label, parts in zip(labels, client_parts, strict=True) for _, y in parts.values() if len(y)]
    if not owners:
        raise DataError("no client has any samples")
    filled = [(x, y) for x, y in pieces if len(y)]  # an empty torch Dataset does not tell its shapes
    x = _concatenate(owners, [x for x, _ in filled])
    encoded = _encode_targets(owners, [y for _, y in filled], classes, target_type, targets)
    y, notes = encoded.y, [*encoded.notes]
    if min_clients > 1:  # targets of a client that joins others may be all the same
        check_targets_differ(encoded)
    if lengths := [len(item) for part, _ in pieces if isinstance(part, Sequences) for item in part.items]:
        notes.append(describe_padding(len(x.shape), lengths))
    known, outline = (hash_samples(x, y), x.outline) if isinstance(x, RowsOnDisk) else ("", x)
    dataset = Dataset(
        name=name,
        x=outline,
        y=y,
        classes=encoded.classes,
        labels=encoded.labels,
        outputs=encoded.outputs,
        known_fingerprint=known,
    )
    if x.dtype == np.uint8:
        notes.append(f"Samples are bytes and reach the model as 0 to {x.max()}; scale them first if it matters.")
    ends = np.cumsum([0, *(len(y) for _, y in pieces)]).tolist()
    places = iter(np.arange(start, stop) for start, stop in pairwise(ends))  # the rows of each piece in x and y
    members = [{part: next(places) for part in parts} for parts in client_parts]
    rows = [np.concatenate(list(parts.values())) for parts in members]
    sizes = [_count(parts, test, validation, [seed, u, 0]) for u, parts in enumerate(members)]
    usable, more_notes = select_usable_clients(dataset, labels, rows, sizes, small_clients, min_clients)
    parts = [Client(labels[u], *_split(members[u], sizes[u][0], test, validation, seed, u)) for u in usable]
    target_scale = None
    if dataset.kind in NUMBER_KINDS:
        y, target_scale = scale_target(y, [client.train for client in parts])
    notes += describe_target_kind(dataset)
    return Federation(
        name=name,
        x=x if isinstance(x, RowsOnDisk) else torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=dataset.classes,
        clients=ClientIndex.from_clients(parts),
        partition={"name": "given", "seed": seed, "fractions": {"test": test, "validation": validation}},
        notes=(*notes, *more_notes),
        source=dataset.fingerprint,
        target_scale=target_scale,
        labels=dataset.labels,
        outputs=dataset.outputs,
    )


def _read_parts(name: str, client: Any) -> dict[str, LabelledSamples]:
    """Read a client's parts: "all", or the parts that the user has split."""
    if not isinstance(client, Mapping):
        return {"all": _read_samples(f"client {name!r}", client)}
    unknown = [key for key in client if key not in PARTS]
    if unknown:
        raise DataError(f"client {name!r}: unknown part {unknown[0]!r}; {did_you_mean(str(unknown[0]), PARTS)}")
    for part in ("train", "test"):
        if part not in client:
            raise DataError(f"client {name!r} has no {part!r} part; a mapping needs train and test")
    return {part: _read_samples(f"client {name!r}, {part}", client[part]) for part in PARTS if part in client}


def _read_samples(where: str, item: Any) -> LabelledSamples:
    """Read samples and labels as arrays; `where` names them in messages."""
    if isinstance(item, torch.utils.data.DataLoader):
        raise DataError(f"{where}: got a DataLoader, expected its Dataset; give loader.dataset, without batches")
    if isinstance(item, torch.utils.data.TensorDataset):
        item = item.tensors
    elif isinstance(item, torch.utils.data.Dataset):
        item = read_torch_dataset(where, item)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{where}: expected a pair (x, y) of arrays or a torch Dataset, got {type(item).__name__}")
    try:
        x: Samples = open_rows(where, item[0]) or find_sequences(where, item[0]) or to_array(item[0])
        y = to_array(item[1])
    except ValueError as error:
        raise DataError(
            f"{where}: its samples have different shapes, expected one for all, or sequences as a list of tensors "
            "(len,) or (len, features)"
        ) from error
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if len(x.shape) < 2 or y.ndim < 1 or len(x) != len(y) or 0 in y.shape[1:]:
        got = f"{tuple(x.shape)} and {y.shape}"
        raise DataError(
            f"{where}: expected x of shape (n, features...) and y of shape (n,), or (n, parts...) for several labels, "
            f"numbers or positions, got {got}"
        )
    if y.dtype.kind not in "buifUO":
        raise DataError(f"{where}: y must hold numbers or text, got {y.dtype}")
    if y.dtype.kind == "O" and (gaps := [i for i, label in enumerate(y.flat) if _is_missing(label)]):
        sample = gaps[0] // (y.size // len(y))
        raise DataError(f"{where}: sample {sample} has no label; leave such samples out, or give them a class")
    if y.dtype.kind == "b" and y.ndim == 1:
        y = y.astype(np.int64)
    row = None
    if isinstance(x, RowsOnDisk):
        row = x.find_nonfinite_row()
    elif isinstance(x, np.ndarray):
        row = find_nonfinite_row(x := _convert(where, x))
    if row is not None:
        raise DataError(f"{where}: sample {row} holds NaN or a value that is not finite in float32")
    return x, y


def _is_missing(label: Any) -> bool:
    return label is None or (not isinstance(label, str) and str(label) in ("nan", "<NA>", "NaT"))


def _convert(where: str, x: Array) -> Array:
    """Return samples in one of the types in which a federation keeps them."""
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: x must hold numbers, got {x.dtype}")
    if x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):  # a value that is not finite is reported
        return x.astype(np.int64 if x.dtype.kind in "ui" else np.float32, copy=False)


def _concatenate(owners: list[str], samples: list[Samples]) -> Array | RowsOnDisk:
    """Put all samples after one another, after a check that they agree in shape and type."""
    xs = [x for x in samples if not isinstance(x, Sequences)]
    if len(xs) < len(samples):
        return join_sequences(owners, samples)
    if {str(x.dtype).removeprefix("torch.") for x in xs} == {"int64", "float32"}:
        xs = [x.float() if isinstance(x, RowsOnDisk) else x.astype(np.float32, copy=False) for x in xs]
    first = xs[0]
    for owner, x in zip(owners, xs, strict=True):
        if isinstance(x, RowsOnDisk) != isinstance(first, RowsOnDisk):
            raise DataError(
                f"one of the clients {owners[0]!r} and {owner!r} has its samples in a file, the other one in memory; "
                "give all as files (np.load with mmap_mode='r') or all in memory"
            )
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise DataError(
                f"client {owner!r} has samples of shape {tuple(x.shape[1:])} and type {x.dtype}, client {owners[0]!r} "
                f"{tuple(first.shape[1:])} and {first.dtype}; all clients need the same"
            )
    on_disk = [x for x in xs if isinstance(x, RowsOnDisk)]
    return join_rows(on_disk) if on_disk else np.concatenate([x for x in xs if not isinstance(x, RowsOnDisk)])


def _encode_targets(
    owners: list[str], ys: list[Array], classes: Sequence[str] | None, kind: TargetType, targets: Sequence[str] | None
) -> Encoded:
    """Return class numbers, int64, numbers to predict, float32, or targets of several parts. Notes say which."""
    if kind not in (kinds := get_args(TargetType)):
        raise ConfigError(f"unknown target_type {kind!r}; {did_you_mean(kind, kinds)}")
    if any(y.ndim > 1 for y in ys):
        return encode_several(owners, ys, classes, targets, kind)
    if targets is not None or kind == "label":
        raise ConfigError(
            "targets and target_type='label' are for y of shape (n, parts), and y has the shape (n,); leave them out"
        )
    if kind == "number" and classes:
        raise ConfigError("target_type='number' and classes do not go together; leave one of them out")
    joint = np.concatenate([y for y in ys if len(y)])
    is_text = joint.dtype.kind in "UO"
    if is_text and kind == "number":
        raise DataError("target_type='number', but the targets are text; give numbers")
    if is_text:
        return Encoded(*_encode_texts(np.concatenate([y.astype(str) for y in ys]), classes))
    is_number, notes = _choose_kind(joint, classes, kind)
    if is_number:
        return Encoded(read_numbers(owners, ys), notes=notes)
    for owner, y in zip(owners, ys, strict=True):
        if not np.isfinite(y).all() or not (y == np.floor(y)).all() or (len(y) and y.min() < 0):
            raise DataError(
                f"client {owner!r}: labels must be whole numbers from 0, or text; numbers to predict need "
                "target_type='number'"
            )
        if classes is not None and len(y) and y.max() >= len(classes):
            raise DataError(f"client {owner!r} has label {y.max()}, but there are {len(classes)} classes, from 0")
    n_classes, n_different = int(joint.max()) + 1, len(np.unique(joint))
    if classes is None and n_classes > MAX_UNUSED_CLASSES * n_different:
        raise DataError(
            f"the labels are {n_different} different numbers up to {n_classes - 1}; number the classes from 0, give "
            "their names as text, or give target_type='number'"
        )
    names = tuple(classes) if classes is not None else tuple(str(c) for c in range(n_classes))
    return Encoded(joint.astype(np.int64), names, notes=notes)


def _encode_texts(labels: Array, classes: Sequence[str] | None) -> tuple[Array, tuple[str, ...]]:
    """Return the class numbers of labels that are text, int64, and the names of the classes."""
    names = tuple(classes) if classes is not None else tuple(str(c) for c in np.unique(labels))
    number = {c: k for k, c in enumerate(names)}
    strange = sorted(set(labels.tolist()) - set(names))
    if strange:
        raise DataError(f"label {strange[0]!r} is no class; {did_you_mean(strange[0], names)}")
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64), names


def _choose_kind(y: Array, classes: Sequence[str] | None, kind: TargetType) -> tuple[bool, list[str]]:
    """Tell whether targets are numbers to predict, and say so where they might be classes, or the other way round."""
    if kind != "auto" or classes is not None:
        return kind == "number" or (kind == "auto" and not classes), []
    values = np.unique(y)
    if not np.isfinite(values).all():
        return y.dtype.kind == "f", []  # refused later
    is_whole = bool((values == np.floor(values)).all())
    is_counting = len(values) == int(values[-1]) + 1 and values[0] == 0
    is_number = y.dtype.kind == "f" or (len(values) > MAX_NUMBER_CLASSES and not is_counting)
    if not is_whole or (not is_number and len(values) <= MAX_NUMBER_CLASSES):
        return is_number, []
    what = f"The targets are {len(values)} different whole numbers ({values[0]:g} to {values[-1]:g})"
    if is_number:
        return True, [f"{what} and taken as numbers to predict; for classes, give target_type='class'."]
    return False, [f"{what} and taken as classes; to predict them as numbers, give target_type='number'."]


def _count(parts: dict[str, Index], test: float, validation: float, stream: Sequence[int]) -> tuple[int, int, int]:
    """Count the samples of a client's training, validation and test part."""
    if "all" in parts:
        return compute_part_sizes(len(parts["all"]), test, validation, stream)
    n_train, n_test = len(parts["train"]), len(parts["test"])
    if "validation" in parts:
        return n_train, len(parts["validation"]), n_test
    n_validation = int(validation * n_train + 1e-9)
    return n_train - n_validation, n_validation, n_test


def _split(
    parts: dict[str, Index], n_train: int, test: float, validation: float, seed: int, number: int
) -> tuple[Index, Index, Index]:
    """Split the samples of client `number` that the user has not split."""
    if "all" in parts:
        return split_parts(parts["all"], test=test, validation=validation, seed=seed, client=number)
    if "validation" in parts:
        return parts["train"], parts["validation"], parts["test"]
    order = np.random.default_rng([seed, number]).permutation(parts["train"])
    return order[:n_train], order[n_train:], parts["test"]
