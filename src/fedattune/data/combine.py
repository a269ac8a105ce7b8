"""Federations put together and taken apart; each client's samples and parts keep their order."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..core.errors import DataError
from .client_index import PARTS, Client, RaggedIndex
from .federated import Federation, infer_schema
from .schema import Schema
from .types import Index


def combine_federations(name: str, pieces: Sequence[Federation]) -> Federation:
    """Put all clients of some federations into one federation, in this order.

    Raises:
        DataError: the pieces differ in their samples, classes or constants, or two clients have one name.

    """
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
        preparation={name: constants for piece in pieces for name, constants in piece.preparation.items()},
    )


def select_clients(federation: Federation, numbers: Index) -> Federation:
    """Return the federation of some clients (M,), in this order, without any other client's samples."""
    clients = federation.index.take(numbers)
    rows = np.unique(np.concatenate([lists.flat for lists in clients.parts.values()])).astype(np.int64)
    index = torch.from_numpy(rows).to(federation.device)
    return replace(
        federation,
        x=federation.x[index],
        y=federation.y[index],
        clients=clients.change(
            lambda lists: RaggedIndex(np.searchsorted(rows, lists.flat), lists.bounds), clients.names
        ),
        source="",
        # The constants of other clients would tell about the other clients' numbers.
        preparation={
            name: federation.preparation[name] for name in clients.names if name in federation.preparation
        },
    )


def select_samples(federation: Federation, members: Index) -> Federation:
    """Return the federation with the samples of clients `members` (M,) alone; other clients are empty.

    Names and constants are left out, because training needs none.
    """
    inside = select_clients(federation.to("cpu"), members)
    return renumber_clients(replace(inside, preparation={}), members, federation.n_clients)


def renumber_clients(federation: Federation, members: Index, n_clients: int) -> Federation:
    """Give the clients other numbers in a larger federation, where all other clients are empty.

    Args:
        federation: the M clients.
        members: their numbers, (M,), sorted.
        n_clients: number of clients of the larger federation.

    """

    def renumber(lists: RaggedIndex) -> RaggedIndex:
        sizes = np.zeros(n_clients, dtype=np.int64)
        sizes[members] = lists.sizes
        return RaggedIndex(lists.flat, np.concatenate([[0], sizes.cumsum()]))

    return replace(federation, clients=federation.index.change(renumber, None))


def _rescale_target(federation: Federation, schema: Schema, where: str) -> Federation:
    """Put a target that is a number into the deviations of a schema."""
    own, common = federation.target_scale, schema.target_scale
    if own is None or own == common:
        return federation
    if common is None:
        raise DataError(
            f"{where}: the target is a number, but the schema has no target_mean and target_deviation, which all nodes "
            "must share; add them to the schema"
        )
    y = (federation.y.double() * own.deviation + own.mean - common.mean) / common.deviation
    return replace(federation, y=y.float(), target_scale=common)


def fit_to_schema(federation: Federation, schema: Schema, where: str) -> Federation:
    """Check a federation against a schema, and take the schema's shift and scale where the data have none.

    Args:
        federation: the data.
        schema: the schema that all nodes share.
        where: name of the data in messages.

    Raises:
        DataError: the data do not fit the schema.

    """
    schema.check(infer_schema(federation), where)
    federation = _rescale_target(federation, schema, where)
    if federation.shift is None and federation.scale is None:
        shift, scale = schema.scaling()
        federation = replace(federation, shift=shift, scale=scale)
    return replace(federation, schema=schema)
