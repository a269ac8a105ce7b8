"""Ways to divide labelled samples among clients.

A partition takes the labels (n,), the number of clients N and a seed, and returns N index arrays. Its
keyword-only parameters are the user's options.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..splits import group_rows
from ..types import Array, Index
from .dirichlet import dirichlet, dirichlet_clients
from .pfedla import pfedla, pfedla_similarity
from .shards import shards
from .two_class import two_class


def iid(labels: Array, n_clients: int, seed: int) -> list[Index]:
    """Equal shares at random, all clients alike.

    Raises:
        DataError: more clients than samples.

    """
    if n_clients > len(labels):
        raise DataError(
            f"{len(labels)} samples cannot be divided among {n_clients} clients; take fewer clients"
        )
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
