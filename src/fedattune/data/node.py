"""The data of one node of a real federation, as its own configuration names them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, ValidationError

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.options import Count, StrictSchema, describe_errors
from .build import federate
from .client_files import CLIENT_SUFFIX, read_client
from .combine import combine_federations, fit_to_schema, select_clients
from .dataset import Dataset
from .federated import Federation
from .images.hub import HUB_IDS
from .schema import Schema, merge_schemas
from .sources import SOURCES
from .splits import check_fractions
from .tables import load_table
from .tables.file import TABLE_SUFFIXES

SplitFractions = tuple[float, float, int]  # test, validation and the seed of the partition


ClientNumbers = tuple[int | None, ...]


NON_DATA_KEYS = ("state", "partition-id", "num-partitions")
"""Keys of a node's configuration that are not about its data."""


class NodeData(NamedTuple):
    """A node's clients with its own samples only, and their numbers in the whole federation where those are known."""

    federation: Federation
    numbers: ClientNumbers


class NodeConfig(StrictSchema):
    """A node's configuration, as far as it is about data; in the keys, hyphens take the place of underscores."""

    model_config = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, alias_generator=lambda name: name.replace("_", "-")
    )

    data: str
    name: str | None = None
    target: str | None = None
    client_column: str | None = None
    test: float | None = None
    validation: float | None = None
    partition: str | None = None
    clients: Count | None = None
    take: str | None = None


def load_node(
    config: Mapping[str, str | int | float | bool],
    schema: Schema | None,
    *,
    test: float,
    validation: float,
    seed: int,
    data_dir: Path | str | None = None,
) -> NodeData:
    """Load the data of one node: its clients, and no sample of any other.

    The configuration is what `flower-supernode --node-config` takes. Its key `data` is one of

    - a table (.csv, .parquet), with `client-column` of several clients, without one of the client called `name`
    - a folder, each file in it a client called like the file: tables of one kind, or files of `export_clients`
    - one file of `export_clients`
    - for trials, a known data set such as digits, with `partition` and `clients`, of which `take`, such as
      "0 5 10", names the clients of this node by their numbers

    A table has its class in the column `target`, by default that of the schema. `test` and `validation` may be
    given there, too, and then count for this node. Without a schema, a node agrees only with itself.

    Raises:
        ConfigError: keys that are unknown, missing or do not go with the data.
        DataError: the data cannot be found, read or divided, or do not fit the schema.

    """
    told = _read_config(config)
    fractions = (
        test if told.test is None else told.test,
        validation if told.validation is None else told.validation,
        seed,
    )
    check_fractions(*fractions)
    if told.data in SOURCES or told.data in HUB_IDS.values():
        _refuse_keys(told, "a table", "target", "client_column")
        found = _take_clients(told, fractions, data_dir)
    else:
        _refuse_keys(told, "a known data set", "partition", "clients", "take")
        files = _find_files(told.data)
        if files[0].suffix.lower() == CLIENT_SUFFIX:
            _refuse_keys(told, "a table", "target", "client_column")
            _refuse_keys(told, "data that are not divided yet", "test", "validation")
            found = _read_clients(told.data, files)
        else:
            found = _read_tables(told, files, schema, fractions)
    return (
        found
        if schema is None
        else found._replace(federation=fit_to_schema(found.federation, schema, told.data))
    )


def _read_config(config: Mapping[str, Any]) -> NodeConfig:
    known = [*(field.alias or name for name, field in NodeConfig.model_fields.items()), *NON_DATA_KEYS]
    given = {key: value for key, value in config.items() if key not in NON_DATA_KEYS}
    if "data" not in given and set(given) <= set(known):
        raise ConfigError(
            "the node's configuration has no data; name a table, a folder or a known data set, such as "
            "data='ward.csv'"
        )
    try:
        return NodeConfig.model_validate(given)
    except ValidationError as error:
        phrases = describe_errors(
            error, unknown=lambda key: f"unknown key {key!r}; {did_you_mean(key, known)}"
        )
        raise ConfigError(f"the node's configuration: {'; '.join(phrases)}") from error


def _refuse_keys(told: NodeConfig, only: str, *fields: str) -> None:
    """Refuse keys that go only with other data."""
    given = [field.replace("_", "-") for field in fields if getattr(told, field) is not None]
    if given:
        raise ConfigError(
            f"the node's configuration: {' and '.join(given)} goes only with {only}, not with {told.data!r}"
        )


def _find_files(data: str) -> list[Path]:
    """The files that a node's data are in, all of one kind.

    Raises:
        ConfigError: there is no such file or folder.
        DataError: the folder holds none, or several kinds.

    """
    path = Path(data).expanduser()
    kinds = {suffix: suffix for suffix in (*TABLE_SUFFIXES, CLIENT_SUFFIX)} | {".pq": ".parquet"}
    if path.is_file():
        if path.suffix.lower() not in kinds:
            raise DataError(
                f"{path} is no table (.csv, .parquet) and no client of fedattune ({CLIENT_SUFFIX})"
            )
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"data: there is no file or folder {data!r}, and no such data set; {did_you_mean(data, SOURCES)}"
        )
    inside = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    files = [file for file in inside if file.suffix.lower() in kinds]
    found = sorted({kinds[file.suffix.lower()] for file in files})
    if not files:
        raise DataError(f"{path} holds no clients; expected files that end in {', '.join(kinds)}")
    if len(found) > 1:
        raise DataError(
            f"{path} holds files of the kinds {' and '.join(found)}; leave those of one kind there"
        )
    return files


def _read_clients(data: str, files: Sequence[Path]) -> NodeData:
    clients = sorted((read_client(file) for file in files), key=lambda client: client.number)
    numbers = [client.number for client in clients]
    repeated = [number for number in numbers if numbers.count(number) > 1]
    if repeated:
        raise DataError(f"{data} holds two clients of the number {repeated[0]}; leave one of them there")
    return NodeData(combine_federations(data, [client.federation for client in clients]), tuple(numbers))


def _read_tables(
    told: NodeConfig, files: Sequence[Path], schema: Schema | None, fractions: SplitFractions
) -> NodeData:
    target = told.target or (schema.target if schema else None)
    if target is None:
        raise ConfigError(f"the table {files[0]} needs the column to predict: add target='COLUMN'")
    whole = Path(told.data).expanduser() == files[0]
    if whole and told.client_column is not None:
        tables = [load_table(files[0], schema, client_column=told.client_column, target=target)]
    else:
        if told.client_column is not None:
            raise ConfigError(
                f"client-column goes only with one table; in the folder {told.data!r} each table is a client"
            )
        if whole and told.name is None:
            raise ConfigError(
                f"the table {files[0]} needs the client's name, name='...', or the column that names several "
                "clients, client-column='COLUMN'"
            )
        tables = [load_table(file, schema, client_column=None, target=target) for file in files]
        if schema is None and len(files) > 1:
            joint = merge_schemas([found.schema for found in tables if found.schema is not None])
            tables = [load_table(file, joint, client_column=None, target=target) for file in files]
        names = [told.name or ""] if whole else [file.stem for file in files]
        tables = [_one_client(found, name) for found, name in zip(tables, names, strict=True)]
    test, validation, seed = fractions
    pieces = [
        federate(found, partition="by_column", test=test, validation=validation, seed=seed, min_clients=1)
        for found in tables
    ]
    federation = combine_federations(told.data, pieces)
    return NodeData(federation, (None,) * federation.n_clients)


def _one_client(found: Dataset, name: str) -> Dataset:
    return replace(found, owner=np.zeros(len(found.y), dtype=np.int64), owners=(name,))


def _take_clients(told: NodeConfig, fractions: SplitFractions, data_dir: Path | str | None) -> NodeData:
    """Those clients of a known data set that this node takes."""
    from .build import load_federation  # this module is one of those that it needs

    test, validation, seed = fractions
    whole = load_federation(
        told.data,
        partition=told.partition,
        clients=told.clients,
        data_dir=data_dir,
        test=test,
        validation=validation,
        seed=seed,
    )
    words = (
        re.split(r"[\s,]+", told.take.strip()) if told.take is not None else map(str, range(whole.n_clients))
    )
    numbers = []
    for word in words:
        if not re.fullmatch(r"\d{1,9}", word, re.ASCII) or not int(word) < whole.n_clients:
            raise ConfigError(
                f"take: expected numbers of clients from 0 to {whole.n_clients - 1}, such as '0 5', got {word!r}"
            )
        numbers.append(int(word))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"take: a client is named twice in {told.take!r}")
    return NodeData(select_clients(whole, np.array(numbers)), tuple(numbers))
