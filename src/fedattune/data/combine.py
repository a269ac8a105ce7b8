"""Federations taken apart and put together, so that each client's samples and parts keep their order."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..core.errors import DataError
from .client_index import PARTS, Client, ClientIndex, RaggedIndex
from .federated import Federation, infer_schema
from .schema import NestedNumbers, Schema
from .types import Array, Index


def combine_federations(name: str, pieces: Sequence[Federation]) -> Federation:
    """One federation of all clients of these, in this order.

    Raises:
        DataError: they differ in their samples, classes or constants, or clients have one name.

    """
    first = pieces[0]
    if len(pieces) == 1:
        return replace(first, name=name)
    wanted = infer_schema(first)
    for piece in pieces:
        found = infer_schema(piece)
        if found != wanted or piece.x.dtype != first.x.dtype:
            where = [key for key in Schema.model_fields if getattr(found, key) != getattr(wanted, key)]
            raise DataError(
                f"{name}: client {piece.names[0]!r} differs from client {first.names[0]!r} in "
                f"{' and '.join(where) or 'the type of its samples'}; all clients of a node need data of one schema"
            )
    starts = np.cumsum([0, *(len(piece.y) for piece in pieces)]).tolist()
    return replace(
        first,
        name=name,
        x=torch.cat([piece.x for piece in pieces]),
        y=torch.cat([piece.y for piece in pieces]),
        clients=[
            Client(client.name, *(getattr(client, part) + start for part in PARTS))
            for piece, start in zip(pieces, starts, strict=False)
            for client in piece.clients
        ],
        partition={**first.partition, "clients": sum(piece.n_clients for piece in pieces)},
        notes=tuple(dict.fromkeys(note for piece in pieces for note in piece.notes)),
        source="",
        preparation={name: its for piece in pieces for name, its in piece.preparation.items()},
    )


def select_clients(federation: Federation, numbers: Sequence[int]) -> Federation:
    """The federation of some clients, in this order, with none but their samples."""
    held = [federation.clients[u] for u in numbers]
    rows = np.unique(np.concatenate([client.all for client in held]))
    index = torch.from_numpy(rows).to(federation.device)
    return replace(
        federation,
        x=federation.x[index],
        y=federation.y[index],
        clients=[
            Client(client.name, *(np.searchsorted(rows, getattr(client, part)) for part in PARTS))
            for client in held
        ],
        source="",
        preparation=select_constants(federation, [client.name for client in held]),
    )


def select_constants(federation: Federation, names: Sequence[str]) -> dict[str, Array]:
    """The constants of some clients of a table, by name; what others' numbers are like is not told."""
    return {name: federation.preparation[name] for name in names if name in federation.preparation}


def fit_to_schema(federation: Federation, schema: Schema, where: str) -> Federation:
    """The federation, its samples scaled as the schema says where they have no constants of their own.

    Raises:
        DataError: it does not fit the schema.

    """
    schema.check(infer_schema(federation), where)
    if federation.shift is None and federation.scale is None:
        federation = replace(
            federation, shift=constants_to_tensor(schema.shift), scale=constants_to_tensor(schema.scale)
        )
    return replace(federation, schema=schema)


def constants_to_tensor(values: NestedNumbers | None) -> torch.Tensor | None:
    """The shift or scale of a schema, float32."""
    return None if values is None else torch.tensor(values, dtype=torch.float32)


def select_samples(federation: Federation, members: Index) -> Federation:
    """The federation with the samples of clients `members` (M,) alone; the other clients have none, and no names."""
    mine = federation.index.take(members)
    rows = np.unique(np.concatenate([mine.parts[part].flat for part in PARTS])).astype(np.int64)

    def moved(lists: RaggedIndex) -> RaggedIndex:
        return RaggedIndex(np.searchsorted(rows, lists.flat), lists.bounds)

    parts = mine.parts
    index = torch.from_numpy(rows)
    inside = replace(
        federation,
        x=federation.x.cpu()[index],
        y=federation.y.cpu()[index],
        clients=ClientIndex(
            moved(parts["train"]), moved(parts["validation"]), moved(parts["test"]), names=mine.names
        ),
        preparation={},  # its names would tell of clients that are elsewhere, and training needs none
    )
    return renumber_clients(inside, members, federation.n_clients)


def renumber_clients(federation: Federation, members: Index, n_clients: int) -> Federation:
    """The federation among `n_clients`, its own clients under the numbers `members` (M,), sorted; others are empty."""
    held = federation.index.parts

    def placed(lists: RaggedIndex) -> RaggedIndex:
        sizes = np.zeros(n_clients, dtype=np.int64)
        sizes[members] = lists.sizes
        return RaggedIndex(lists.flat, np.concatenate([[0], sizes.cumsum()]))

    clients = ClientIndex(placed(held["train"]), placed(held["validation"]), placed(held["test"]))
    return replace(federation, clients=clients)
