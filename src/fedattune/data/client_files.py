"""Files of one client's samples each, so that the clients of a federation can be handed out to nodes."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import ConfigError, DataError
from ..core.io import clean_file_name, replace_atomically
from .client_index import PARTS, Client
from .dataset import Dataset
from .federated import Federation, infer_schema
from .schema import Schema
from .tables.scaling import constants_from_card, constants_to_card
from .types import Array

CLIENT_SUFFIX = ".safetensors"
CLIENT_FILE_KIND = "fedattune client 1"
"""The mark of such a file, with the version of its format."""
CLIENT_TENSORS = ("x", "y", *PARTS)


class ClientFile(NamedTuple):
    """The content of a client's file."""

    federation: Federation  # of that client alone
    number: int  # in the whole federation


def deal_clients(n_clients: int, nodes: int) -> list[list[int]]:
    """Deal clients out to nodes in turns, and return the numbers of each node's clients.

    Raises:
        ConfigError: there are fewer clients than nodes, or no nodes.
    """
    if not 1 <= nodes <= n_clients:
        raise ConfigError(
            f"{n_clients} clients cannot be divided among {nodes} nodes; every node needs at least one client"
        )
    return [list(range(node, n_clients, nodes)) for node in range(nodes)]


def export_clients(federation: Federation, folder: Path | str, groups: Sequence[Sequence[int]]) -> list[Path]:
    """Write the clients numbered in each group to a folder of its own, which is one node's `data`.

    A client's file NUMBER-NAME.safetensors holds only that client's samples as the federation keeps them, the parts in
    their order, and the schema. So training on the file equals training in the whole federation.

    Returns:
        The folders node-0, node-1, ...

    Raises:
        ConfigError: a group is empty, a number is no client, or a number appears twice.
        DataError: a folder has such files already, or they cannot be written.
    """
    times = Counter(u for group in groups for u in group)
    wrong = [u for u, n in times.items() if not 0 <= u < federation.n_clients or n > 1]
    if wrong:
        raise ConfigError(
            f"client {wrong[0]} cannot go to a node: give each of the numbers 0 to {federation.n_clients - 1} at "
            "most once"
        )
    folders = [Path(folder) / f"node-{node}" for node in range(len(groups))]
    for node, group in zip(folders, groups, strict=True):
        if not group:
            raise ConfigError(f"{node.name} has no clients; every node needs at least one")
        if any(node.glob(f"*{CLIENT_SUFFIX}")):
            raise DataError(f"{node} already holds clients; delete it first or take another folder")
    schema = infer_schema(federation)
    for node, group in zip(folders, groups, strict=True):
        try:
            node.mkdir(parents=True, exist_ok=True)
            for u in group:
                _write_client(node, federation, u, schema)
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot write clients to {node}: {error}") from error
    return folders


def _write_client(folder: Path, federation: Federation, number: int, schema: Schema) -> None:
    client = federation.clients[number]
    rows = torch.from_numpy(client.all).to(federation.device)
    ends = np.cumsum([0, *(len(getattr(client, part)) for part in PARTS)]).tolist()
    tensors = {"x": federation.stored(rows).cpu().contiguous(), "y": federation.y[rows].cpu()}
    for part, (start, stop) in zip(PARTS, pairwise(ends), strict=True):
        tensors[part] = torch.arange(start, stop)  # positions in the client's own rows
    about = {"kind": CLIENT_FILE_KIND, "name": client.name, "number": str(number), "schema": schema.to_json()}
    if client.name in federation.preparation:
        about["preparation"] = json.dumps(constants_to_card(federation.preparation[client.name], schema.numbers))
    with replace_atomically(folder / f"{number}-{clean_file_name(client.name)}{CLIENT_SUFFIX}") as new:
        save_file(tensors, new, about)


def read_client(path: Path) -> ClientFile:
    """Read the client in a file that `export_clients` wrote."""
    if not path.is_file():
        raise DataError(f"no such client file: {path}")
    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
            tensors: dict[str, Array] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: numbers that NumPy does not have
        raise DataError(f"{path} cannot be read as safetensors: {error}; copy or export it again") from error
    if about.get("kind") != CLIENT_FILE_KIND or set(tensors) != set(CLIENT_TENSORS):
        raise DataError(
            f"{path} is no client of fedattune: expected a file of the kind {CLIENT_FILE_KIND!r} with "
            f"{', '.join(CLIENT_TENSORS)}, got "
            f"{about.get('kind', 'no kind')!r} with {', '.join(sorted(tensors)) or 'nothing'}; write it with "
            "export_clients"
        )
    number = about.get("number", "")
    if not re.fullmatch(r"\d{1,9}", number, re.ASCII):
        raise DataError(f"{path}: the client's number must be 0 or more, got {number!r}; export it again")
    name, preparation = about.get("name", path.stem), dict[str, Array]()
    try:
        schema = Schema.from_json(about.get("schema", ""))
        if "preparation" in about:  # only a table has constants
            preparation[name] = constants_from_card(json.loads(about["preparation"]), schema.numbers)
    except (ValueError, TypeError, RecursionError, ConfigError, DataError) as error:
        raise DataError(f"{path}: {error}; export it again") from error
    data = Dataset(  # checks both arrays
        name=str(path),
        x=tensors["x"],
        y=tensors["y"],
        classes=schema.classes,
        labels=schema.labels,
        outputs=schema.outputs,
    )
    if data.x.shape[1:] != schema.input_shape:
        raise DataError(
            f"{path}: samples have the shape {data.x.shape[1:]}, but its schema says {schema.input_shape}; export "
            "it again"
        )
    for part in PARTS:
        if tensors[part].ndim != 1 or tensors[part].dtype != np.int64:
            raise DataError(
                f"{path}: {part} must be int64 indices of shape (n,), got {tensors[part].dtype} of shape "
                f"{tensors[part].shape}; export it again"
            )
    shift, scale = schema.scaling()
    federation = Federation(
        name=str(path),
        x=torch.from_numpy(data.x),
        y=torch.from_numpy(data.y),
        classes=data.classes,
        clients=[Client(name, *(tensors[part] for part in PARTS))],
        shift=shift,
        scale=scale,
        partition={"name": "given", "clients": 1},
        schema=schema if schema.columns else None,
        preparation=preparation,
        target_scale=schema.target_scale,
        labels=data.labels,
        outputs=data.outputs,
    )
    return ClientFile(federation, int(number))
