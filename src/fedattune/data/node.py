"""The data of one node of a real federation, which the node's own configuration names."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from pydantic import ConfigDict, ValidationError

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.options import Count, StrictSchema, describe_errors
from .build import load_federation, partition_dataset
from .client_files import CLIENT_SUFFIX, read_client
from .federated import Federation, combine_federations, fit_to_schema, select_clients, share_target_scale
from .images.folder import find_image_files, load_image_folder
from .images.hub import HUB_IDS
from .schema import Schema, merge_schemas
from .sources import SOURCES
from .splits import check_fractions
from .tables import load_table
from .tables.by_schema import find_table_problems
from .tables.file import TABLE_SUFFIXES

FLOWER_KEYS = ("state", "partition-id", "num-partitions")
"""Keys that Flower and its simulations write, which are not about data."""


TABLE_KEYS = ("target", "client_column", "group_column")
"""Fields of a node's configuration that are about tables."""


class Split(TypedDict):
    """The split of a client's samples into parts: the arguments of `partition_dataset` that decide it."""

    test: float
    validation: float
    seed: int


class NodeData(NamedTuple):
    """A node's clients with their own samples only, and their numbers in the whole federation, None where unknown."""

    federation: Federation
    numbers: tuple[int | None, ...]


class NodeProblem(NamedTuple):
    """Describe a problem of a node's data, in one sentence that says what to do."""

    kind: Literal["configuration", "data"]
    text: str


class NodeConfigError(ConfigError):
    """Keys of the node's configuration are unknown or missing, or do not go with its data."""


def _to_key(field: str) -> str:
    return field.replace("_", "-")


class NodeConfig(StrictSchema):
    """The part of a node's configuration that is about data; keys have hyphens in place of underscores."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, alias_generator=_to_key)

    data: str
    name: str | None = None
    target: str | None = None
    client_column: str | None = None
    group_column: str | None = None
    image_size: Count | None = None
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
    other_keys: Collection[str] = FLOWER_KEYS,
) -> NodeData:
    """Load the data of one node: its clients, and no sample of any other client.

    The configuration's key `data` is one of

    - a table (.csv, .parquet) of several clients with `client-column`, or of the one client called `name`
    - a folder where each file is a client called like the file: tables of one kind, or files of `export_clients`
    - one file of `export_clients`
    - a folder of images: CLASS/*.png of the one client called `name`, or CLIENT/CLASS/*.png of several clients
    - for trials, a known data set such as digits, with `partition` and `clients`; `take`, such as "0 5 10", lists the
      numbers of this node's clients

    A table has its class in the column `target`, by default the schema's. Rows with the same value of `group-column`
    stay in one part. `image-size` resizes images to this width and height, in pixels. The keys `test` and `validation`
    count for this node only. Without a schema that all nodes share, only the node's own clients must agree.

    Raises:
        ConfigError: a key is unknown or missing, or does not go with the data.
        DataError: the data cannot be found, read or divided, or do not fit the schema.
    """
    node = _read_config(config, other_keys)
    split = Split(
        test=test if node.test is None else node.test,
        validation=validation if node.validation is None else node.validation,
        seed=seed,
    )
    check_fractions(**split)
    if node.data in SOURCES or node.data in HUB_IDS.values():
        _refuse_keys(node, "a table", *TABLE_KEYS)
        _refuse_keys(node, "a folder of images", "image_size")
        data = _take_clients(node, split, data_dir)
    else:
        _refuse_keys(node, "a known data set", "partition", "clients", "take")
        files = _find_files(node.data)
        if not files:
            return _read_images(node, schema, split)
        _refuse_keys(node, "a folder of images", "image_size")
        if files[0].suffix.lower() == CLIENT_SUFFIX:
            _refuse_keys(node, "a table", *TABLE_KEYS)
            _refuse_keys(node, "data that are not divided yet", "test", "validation")
            clients = sorted(map(read_client, files), key=lambda client: client.number)
            numbers = [client.number for client in clients]
            if repeated := [number for number in numbers if numbers.count(number) > 1]:
                raise DataError(f"{node.data} holds two clients of the number {repeated[0]}; keep one of them")
            federation = combine_federations(node.data, [client.federation for client in clients])
            data = NodeData(federation, tuple(numbers))
        else:
            data = _read_tables(node, files, schema, split)
    if schema is None:
        return data
    return data._replace(federation=fit_to_schema(data.federation, schema, node.data))


def find_node_problems(
    config: Mapping[str, str | int | float | bool],
    schema: Schema | None,
    *,
    test: float,
    validation: float,
    data_dir: Path | str | None = None,
    other_keys: Collection[str] = FLOWER_KEYS,
) -> list[NodeProblem]:
    """Find all problems of a node's data that can be distinguished.

    Without the schema that all nodes share, only the first problem is found.
    """
    try:
        node = _read_config(config, other_keys)
        if problems := _find_table_problems(node, schema) if schema is not None else []:
            return [NodeProblem("data", text) for text in (*problems, *_find_name_problems(node))]
        split = Split(test=test, validation=validation, seed=0)
        load_node(config, schema, **split, data_dir=data_dir, other_keys=other_keys)
    except (ConfigError, DataError) as error:
        return [NodeProblem("configuration" if isinstance(error, NodeConfigError) else "data", str(error))]
    return []


def _find_table_problems(node: NodeConfig, schema: Schema) -> list[str]:
    """Find the problems of a node's tables; none for other data."""
    target = node.target or schema.target
    if node.data in SOURCES or node.data in HUB_IDS.values() or not schema.columns or target is None:
        return []
    return [
        problem
        for file in _find_files(node.data)
        if file.suffix.lower() != CLIENT_SUFFIX
        for problem in find_table_problems(file, schema, client_column=node.client_column, target=target)
    ]


def _find_name_problems(node: NodeConfig) -> Iterator[str]:
    """Find what is wrong with the names of the clients in a node's tables."""
    path = Path(node.data).expanduser()
    if path.is_dir() and node.client_column is not None:
        yield f"client-column goes only with one table; in the folder {node.data!r} each table is a client"
    if not path.is_dir() and node.client_column is None and node.name is None:
        yield (
            f"the table {path} needs the client's name, name='...', or the column that names several clients, "
            "client-column='COLUMN'"
        )


def _read_config(config: Mapping[str, Any], other_keys: Collection[str]) -> NodeConfig:
    keys = [*(field.alias or name for name, field in NodeConfig.model_fields.items()), *other_keys]
    values = {key: value for key, value in config.items() if key not in other_keys}
    if "data" not in values and set(values) <= set(keys):
        raise NodeConfigError(
            "the node's configuration has no data; name a table, a folder or a known data set, such as data='ward.csv'"
        )
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        phrases = describe_errors(error, unknown=lambda key: f"unknown key {key!r}; {did_you_mean(key, keys)}")
        raise NodeConfigError(f"the node's configuration: {'; '.join(phrases)}") from error


def _refuse_keys(node: NodeConfig, only: str, *fields: str) -> None:
    """Refuse keys that go only with other data."""
    needless = " and ".join(_to_key(field) for field in fields if getattr(node, field) is not None)
    if needless:
        raise NodeConfigError(f"the node's configuration: {needless} goes only with {only}, not with {node.data!r}")


def _find_files(data: str) -> list[Path]:
    """Find the files of a node's data, all of one kind; none if folders are in their place, which hold images."""
    path = Path(data).expanduser()
    kinds = {suffix: suffix for suffix in (*TABLE_SUFFIXES, CLIENT_SUFFIX)} | {".pq": ".parquet"}
    if path.is_file():
        if path.suffix.lower() not in kinds:
            raise DataError(f"{path} is no table (.csv, .parquet) and no client of fedattune ({CLIENT_SUFFIX})")
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"data: there is no file or folder {data!r}, and no such data set; {did_you_mean(data, SOURCES)}"
        )
    inside = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    files = [file for file in inside if file.suffix.lower() in kinds]
    suffixes = sorted({kinds[file.suffix.lower()] for file in files})
    if not files and any(one.is_dir() and not one.name.startswith(".") for one in path.iterdir()):
        return []
    if not files:
        raise DataError(
            f"{path} holds no clients; expected files that end in {', '.join(kinds)}, or folders of images, one a class"
        )
    if len(suffixes) > 1:
        raise DataError(f"{path} holds files of the kinds {' and '.join(suffixes)}; keep the files of one kind only")
    return files


def _read_images(node: NodeConfig, schema: Schema | None, split: Split) -> NodeData:
    _refuse_keys(node, "a table", *TABLE_KEYS)
    root = Path(node.data).expanduser()
    has_clients = find_image_files(root)[0][0].client is not None
    if not has_clients and node.name is None:
        raise ConfigError(
            f"the images in {root}/CLASS need the client's name, name='...'; several clients have folders "
            f"{root}/CLIENT/CLASS"
        )
    data = load_image_folder(root, schema, image_size=node.image_size)
    if schema is not None and data.x.shape[1:] != schema.input_shape:
        _, *sides = schema.input_shape
        size = f"; add image-size={sides[0]}" if len(sides) == 2 and sides[0] == sides[1] else ""
        raise DataError(
            f"{root} has images of the shape {data.x.shape[1:]}, but the schema says {schema.input_shape}{size}"
        )
    if schema is not None and schema.scaling() != (None, None):
        data = replace(data, shift=None, scale=None)  # the schema's follow
    if not has_clients:
        data = replace(data, owner=np.zeros(len(data.y), dtype=np.int64), owners=(node.name or "",))
    federation = partition_dataset(data, partition="by_column", small_clients="error", min_clients=1, **split)
    if schema is not None:
        federation = fit_to_schema(federation, schema, node.data)
    return NodeData(federation, (None,) * federation.n_clients)


def _read_tables(node: NodeConfig, files: Sequence[Path], schema: Schema | None, split: Split) -> NodeData:
    target = node.target or (schema.target if schema else None)
    if target is None:
        raise ConfigError(f"the table {files[0]} needs the column to predict: add target='COLUMN'")
    for problem in _find_name_problems(node):
        raise ConfigError(problem)
    is_file = Path(node.data).expanduser() == files[0]
    load = partial(load_table, target=target, group_column=node.group_column)
    if is_file and node.client_column is not None:
        tables = [load(files[0], schema, client_column=node.client_column)]
    else:
        tables = [load(file, schema, client_column=None) for file in files]
        if schema is None and len(files) > 1:
            joint = merge_schemas([data.schema for data in tables if data.schema is not None])
            tables = [load(file, joint, client_column=None) for file in files]
        names = [node.name or ""] if is_file else [file.stem for file in files]
        tables = [
            replace(data, owner=np.zeros(len(data.y), dtype=np.int64), owners=(name,))
            for data, name in zip(tables, names, strict=True)
        ]
    # A node knows nothing of other nodes' numbers, so each of its clients scales its own.
    as_named: dict[str, Any] = {"partition": "by_column", "small_clients": "error", "min_clients": 1, **split}
    as_named["scaling"] = "client"
    pieces = share_target_scale(
        [partition_dataset(data, **as_named) for data in tables], schema.target_scale if schema else None
    )
    federation = combine_federations(node.data, pieces)
    return NodeData(federation, (None,) * federation.n_clients)


def _take_clients(node: NodeConfig, split: Split, data_dir: Path | str | None) -> NodeData:
    """Load the clients of a known data set that this node takes."""
    whole = load_federation(node.data, partition=node.partition, clients=node.clients, data_dir=data_dir, **split)
    words = re.split(r"[\s,]+", node.take.strip()) if node.take is not None else map(str, range(whole.n_clients))
    numbers = []
    for word in words:
        if not re.fullmatch(r"\d{1,9}", word, re.ASCII) or not int(word) < whole.n_clients:
            raise ConfigError(
                f"take: expected numbers of clients from 0 to {whole.n_clients - 1}, such as '0 5', got {word!r}"
            )
        numbers.append(int(word))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"take: a client is named twice in {node.take!r}")
    return NodeData(select_clients(whole, np.array(numbers)), tuple(numbers))
