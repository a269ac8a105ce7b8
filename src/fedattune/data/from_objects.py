"""A federation from the user's own Python objects, one per client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core.errors import DataError, did_you_mean
from .build import SmallClients, select_usable_clients
from .client_index import PARTS, Client, ClientIndex
from .dataset import Dataset
from .federated import Federation
from .splits import check_fractions, compute_part_sizes, split_parts
from .types import Array, Index

LabelledSamples = tuple[Array, Array]  # samples and labels of one part of a client


def federation(
    clients: Sequence[Any] | Mapping[str, Any],
    *,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int = 0,
    small_clients: SmallClients = "error",
    min_clients: int = 2,
    name: str = "own data",
) -> Federation:
    """Build a federation from one object per client, in a list or by the client's name.

    Each is a pair `(x, y)` of arrays or tensors, a `torch.utils.data.Dataset` of such items, or, where the
    user has split already, a mapping with such an object for "train" and "test" and maybe "validation".
    Samples are used as they are: (n_i, *shape), uint8 or converted to float32. Labels are whole numbers from
    0, or text.

    At least `min_clients` clients are wanted: two can learn from each other, one can only join others.

    Raises:
        ConfigError: impossible fractions.
        DataError: clients that do not fit together or are too small; the message names the client.

    Examples:
        >>> x, y = torch.arange(80.0).reshape(40, 2), torch.arange(40) % 2
        >>> data = federation({"north": (x[:24], y[:24]), "south": (x[24:], y[24:])}, classes=["no", "yes"])
        >>> list(data.names), data.classes, data.sizes("test").tolist()
        (['north', 'south'], ('no', 'yes'), [6, 4])

    """
    check_fractions(test, validation, seed)
    if isinstance(clients, Mapping):
        names, clients = names or list(clients), list(clients.values())
    if not clients:
        raise DataError("no clients; give a list with one (x, y) pair, torch Dataset or mapping per client")
    labels = tuple(str(u) for u in range(len(clients))) if names is None else tuple(map(str, names))
    if len(labels) != len(clients):
        raise DataError(f"{len(clients)} clients but {len(labels)} names")
    read = [_read_parts(who, client) for who, client in zip(labels, clients, strict=True)]
    owners = [who for who, parts in zip(labels, read, strict=True) for _ in parts]
    pieces = [piece for parts in read for piece in parts.values()]
    x = _concatenate(owners, [x for x, _ in pieces])
    y, class_names = _encode_labels(owners, [y for _, y in pieces], classes)
    dataset = Dataset(name=name, x=x, y=y, classes=class_names)
    notes = []
    if x.dtype == np.uint8:
        notes.append(
            f"Samples are bytes and reach the model as 0 to {x.max()}; scale them first if it matters."
        )
    members = _locate_parts(read)
    rows = [np.concatenate(list(parts.values())) for parts in members]
    kept, said = select_usable_clients(
        name,
        labels,
        rows,
        y,
        class_names,
        sizes=[_count_parts(parts, test, validation) for parts in members],
        one_class=False,
        small_clients=small_clients,
        min_clients=min_clients,
    )
    return Federation(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=class_names,
        clients=ClientIndex.from_clients(
            _build_client(labels[u], members[u], (test, validation), seed, u) for u in kept
        ),
        partition={"name": "given", "seed": seed, "fractions": {"test": test, "validation": validation}},
        notes=(*notes, *said),
        source=dataset.fingerprint,
    )


def _read_parts(who: str, client: Any) -> dict[str, LabelledSamples]:
    """The client's parts: "all", or those that the user split."""
    if not isinstance(client, Mapping):
        return {"all": _read_samples(f"client {who!r}", client)}
    unknown = [key for key in client if key not in PARTS]
    if unknown:
        raise DataError(
            f"client {who!r}: unknown part {unknown[0]!r}; {did_you_mean(str(unknown[0]), PARTS)}"
        )
    for part in ("train", "test"):
        if part not in client:
            raise DataError(f"client {who!r} has no {part!r} part; a mapping needs train and test")
    return {
        str(part): _read_samples(f"client {who!r}, {part}", client[part]) for part in PARTS if part in client
    }


def _read_samples(where: str, given: Any) -> LabelledSamples:
    """Samples and labels as arrays."""
    if isinstance(given, torch.utils.data.TensorDataset):
        given = given.tensors
    elif isinstance(given, torch.utils.data.Dataset):
        if not hasattr(given, "__len__"):
            raise DataError(f"{where}: an iterable Dataset has no length; give arrays or an indexed Dataset")
        items = [given[i] for i in range(len(given))]
        if any(not isinstance(item, (tuple, list)) or len(item) != 2 for item in items):
            raise DataError(f"{where}: every item of the Dataset must be a pair (x, y)")
        given = (
            _stack_samples(where, [_to_array(a) for a, _ in items]),
            np.asarray([_to_array(b) for _, b in items]),
        )
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            f"{where}: expected a pair (x, y) of arrays or a torch Dataset, got {type(given).__name__}"
        )
    x, y = _to_array(given[0]), _to_array(given[1])
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{where}: expected x of shape (n, features...) and y of shape (n,), got {x.shape} and {y.shape}"
        )
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: x must hold numbers, got {x.dtype}")
    if y.dtype.kind not in "buifUO":
        raise DataError(f"{where}: y must hold whole numbers or text, got {y.dtype}")
    if y.dtype.kind == "b":
        y = y.astype(np.int64)
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # reported just below
            x = x.astype(np.float32)
    if not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))[0])
        raise DataError(f"{where}: sample {row} holds NaN or a value that is not finite in float32")
    return x, y


def _to_array(given: Any) -> Array:
    return given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)


def _stack_samples(where: str, arrays: list[Array]) -> Array:
    shapes = sorted({a.shape for a in arrays})
    if len(shapes) != 1:
        raise DataError(f"{where}: samples must all have one shape, got {shapes[:3] or 'no samples'}")
    return np.stack(arrays)


def _concatenate(owners: list[str], xs: list[Array]) -> Array:
    """All samples in one array; they must agree in shape and type."""
    first = xs[0]
    for who, x in zip(owners, xs, strict=True):
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise DataError(
                f"client {who!r} has samples of shape {x.shape[1:]} and type {x.dtype}, client {owners[0]!r} "
                f"{first.shape[1:]} and {first.dtype}; all clients need the same"
            )
    if not any(map(len, xs)):
        raise DataError("no client has any samples")
    return np.concatenate(xs)


def _encode_labels(
    owners: list[str], ys: list[Array], classes: Sequence[str] | None
) -> tuple[Array, tuple[str, ...]]:
    """Labels as int64 in [0, classes), and the classes' names."""
    text = [y.dtype.kind in "UO" for y in ys if len(y)]
    if any(text):
        joint = np.concatenate([y.astype(str) for y in ys])
        known = tuple(classes) if classes is not None else tuple(str(c) for c in np.unique(joint))
        number = {c: k for k, c in enumerate(known)}
        strange = sorted(set(joint.tolist()) - set(known))
        if strange:
            raise DataError(f"label {strange[0]!r} is no class; {did_you_mean(strange[0], known)}")
        return np.array([number[label] for label in joint.tolist()], dtype=np.int64), known
    for who, y in zip(owners, ys, strict=True):
        if not (y == np.floor(y)).all() or (len(y) and y.min() < 0):
            raise DataError(f"client {who!r}: labels must be whole numbers from 0, or text")
        if classes is not None and len(y) and y.max() >= len(classes):
            raise DataError(
                f"client {who!r} has label {y.max()}, but there are {len(classes)} classes, from 0"
            )
    joint = np.concatenate(ys).astype(np.int64)
    return joint, tuple(classes) if classes is not None else tuple(str(c) for c in range(joint.max() + 1))


def _locate_parts(read: list[dict[str, LabelledSamples]]) -> list[dict[str, Index]]:
    """Where each client's parts lie in the joint arrays."""
    end = 0
    members = []
    for parts in read:
        member = {}
        for part, (_, y) in parts.items():
            member[part] = np.arange(end, end + len(y), dtype=np.int64)
            end += len(y)
        members.append(member)
    return members


def _count_parts(parts: dict[str, Index], test: float, validation: float) -> tuple[int, int, int]:
    if "all" in parts:
        return compute_part_sizes(len(parts["all"]), test, validation)
    n_train = len(parts["train"])
    held_out = len(parts["validation"]) if "validation" in parts else int(validation * n_train + 1e-9)
    return n_train - held_out * ("validation" not in parts), held_out, len(parts["test"])


def _build_client(
    name: str, parts: dict[str, Index], fractions: tuple[float, float], seed: int, number: int
) -> Client:
    test, validation = fractions
    if "all" in parts:
        return Client(
            name, *split_parts(parts["all"], test=test, validation=validation, seed=seed, client=number)
        )
    if "validation" in parts:
        return Client(name, parts["train"], parts["validation"], parts["test"])
    order = np.random.default_rng([seed, number]).permutation(parts["train"])
    cut = _count_parts(parts, test, validation)[0]
    return Client(name, order[:cut], order[cut:], parts["test"])
