"""Ways to divide labelled samples among clients.

A partition takes the labels (n,), the number of clients N and a seed, and returns N index arrays. Its
keyword-only parameters are the user's options.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.errors import DataError, FedAttuneError, summarize_error
from ...core.options import look_up
from ...core.own_code import is_reference, load_function
from ..splits import group_rows
from ..types import Array, Index
from .dirichlet import dirichlet, dirichlet_clients
from .pfedla import pfedla, pfedla_similarity
from .shards import shards
from .two_class import two_class


def iid(labels: Array, n_clients: int, seed: int) -> list[Index]:
    """Equal shares at random, all clients alike."""
    if n_clients > len(labels):
        raise DataError(f"{len(labels)} samples cannot be divided among {n_clients} clients; take fewer clients")
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(order, n_clients)


def by_column(labels: Array, n_clients: int, _seed: int) -> list[Index]:
    """Natural clients, such as the client column of a table.

    Here `labels` holds the number of each sample's client, (n,) in [0, N).
    """
    return group_rows(labels, n_clients)


PARTITIONS: dict[str, Callable[..., list[Any]]] = {
    "dirichlet": dirichlet,
    "dirichlet_clients": dirichlet_clients,
    "two_class": two_class,
    "shards": shards,
    "pfedla": pfedla,
    "pfedla_similarity": pfedla_similarity,
    "iid": iid,
    "by_column": by_column,
}
"""name -> partition of labels, a number of clients and a seed."""
CLASS_PARTITIONS = set(PARTITIONS) - {"iid", "by_column"}
"""Partitions that divide samples by class."""
DEFAULT_SEEDS = {"two_class": 1}
"""Default seeds of partitions; the others have 0."""
DEFAULT_CLIENTS = {"pfedla_similarity": 8}
"""Default numbers of clients of partitions; for the others, the data decide."""
STRATIFIED = {"pfedla", "pfedla_similarity"}
"""Partitions where each part of a client has the same share of every class."""


def find_partition(name: str) -> Callable[..., Any]:
    """Return a partition by its name, or a custom function by its reference."""
    return load_function(name, "the partition") if is_reference(name) else look_up("partition", name, PARTITIONS)


def divide_samples(name: str, labels: Array, n_clients: int, seed: int, options: Mapping[str, Any]) -> list[Index]:
    """Divide samples among clients; return the sample numbers of each client."""
    divide = find_partition(name)
    if not is_reference(name):
        return divide(labels, n_clients, seed, **options)  # type: ignore[no-any-return]
    try:
        parts = divide(labels.copy(), n_clients, seed, **options)
    except FedAttuneError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"the partition {name} failed: {summarize_error(error)}") from error
    if isinstance(parts, str | bytes) or not hasattr(parts, "__len__") or len(parts) != n_clients:
        what = f"{len(parts)} parts" if hasattr(parts, "__len__") else type(parts).__name__
        raise DataError(f"the partition {name} returned {what}, expected {n_clients} arrays, one per client")
    return [_check_rows(name, client, part, len(labels)) for client, part in enumerate(parts)]


def _check_rows(name: str, client: int, part: object, n: int) -> Index:
    """Check the sample numbers of one client."""
    where, rows = f"the partition {name}, client {client}:", np.asarray(part)
    if rows.ndim != 1 or (len(rows) and not np.issubdtype(rows.dtype, np.integer)):
        raise DataError(f"{where} got an array {rows.shape} of {rows.dtype}, expected sample numbers (m,) of int")
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        raise DataError(f"{where} sample numbers should be from 0 to {n - 1}, got {rows.min()} to {rows.max()}")
    unique = np.unique(rows).astype(np.int64)
    if len(unique) < len(rows):
        raise DataError(f"{where} {len(rows) - len(unique)} samples are there twice; name each sample once")
    return unique
