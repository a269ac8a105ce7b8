"""Data: known sets and tables, ways to divide them among clients, and the result, a `Federation`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..registry import options as options_of
from .build import SmallClients, federate, from_manifest
from .client_files import divided, export_clients
from .clients import federation
from .dataset import Dataset
from .federated import Federation
from .manifest import home, load_manifest, save_manifest, saved_partitions
from .members import Client, Clients, Lists, Part
from .node import NodeData, load_node
from .partition import DEFAULT_SEEDS, PARTITIONS
from .parts import split
from .schema import Schema
from .sources import SOURCES, is_table, load, source_name
from .table import table

__all__ = [
    "DEFAULT_SEEDS",
    "PARTITIONS",
    "SOURCES",
    "Client",
    "Clients",
    "Dataset",
    "Federation",
    "Lists",
    "NodeData",
    "Part",
    "Schema",
    "SmallClients",
    "divided",
    "export_clients",
    "federate",
    "federation",
    "from_manifest",
    "home",
    "is_table",
    "load",
    "load_federation",
    "load_manifest",
    "load_node",
    "save_manifest",
    "saved_partitions",
    "source_name",
    "split",
    "table",
]


def load_federation(
    data: str | Path = "digits",
    *,
    partition: str | None = None,
    clients: int | None = None,
    data_dir: Path | str | None = None,
    client_column: str | None = None,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    partition_options: Mapping[str, Any] | None = None,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int | None = None,
    small_clients: SmallClients = "error",
    stratify: bool | None = None,
) -> Federation:
    """Load data by name or from a table file and divide it among clients.

    Raises:
        ConfigError: unknown names, or options that do not fit.
        DataError: the data cannot be found, read or divided so.

    Examples:
        >>> data = load_federation("digits", partition="dirichlet", clients=4)
        >>> data
        Federation('digits', 4 clients, 1797 samples, 10 classes)
        >>> int(data.label_counts().sum()), len(data.clients[0].train) > len(data.clients[0].test)
        (1797, True)

    """
    given = dict(options or {})
    makes_clients = not is_table(data) and "clients" in {
        o.name for o in options_of(SOURCES[source_name(str(data))])
    }
    if makes_clients and clients is not None and partition in (None, "by_column"):
        given.setdefault("clients", clients)  # the source makes its clients: let it make that many
    dataset = load(data, data_dir=data_dir, options=given, client_column=client_column, target=target)
    return federate(
        dataset,
        partition=partition,
        options=partition_options,
        clients=clients,
        test=test,
        validation=validation,
        seed=seed,
        small_clients=small_clients,
        stratify=stratify,
    )
