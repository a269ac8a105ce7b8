"""The part of a federation that is at one place: samples of some clients, under the numbers that all know."""

from dataclasses import replace

import numpy as np
import torch

from .dataset import Index
from .federated import Federation
from .members import PARTS, Clients, Lists


def share(federation: Federation, members: Index) -> Federation:
    """The federation with the samples of clients `members` (M,) alone; the other clients have none, and no names."""
    mine = Clients.of(federation.clients).take(members)
    rows = np.unique(np.concatenate([mine.parts[part].flat for part in PARTS])).astype(np.int64)

    def moved(lists: Lists) -> Lists:
        return Lists(np.searchsorted(rows, lists.flat), lists.bounds)

    parts = mine.parts
    index = torch.from_numpy(rows)
    inside = replace(
        federation,
        x=federation.x.cpu()[index],
        y=federation.y.cpu()[index],
        clients=Clients(
            moved(parts["train"]), moved(parts["validation"]), moved(parts["test"]), names=mine.names
        ),
        preparation={},  # its names would tell of clients that are elsewhere, and training needs none
    )
    return numbered(inside, members, federation.n_clients)


def numbered(federation: Federation, members: Index, n_clients: int) -> Federation:
    """The federation among `n_clients`, its own clients under the numbers `members` (M,), sorted; others are empty."""
    held = Clients.of(federation.clients).parts

    def placed(lists: Lists) -> Lists:
        sizes = np.zeros(n_clients, dtype=np.int64)
        sizes[members] = lists.sizes
        return Lists(lists.flat, np.concatenate([[0], sizes.cumsum()]))

    clients = Clients(placed(held["train"]), placed(held["validation"]), placed(held["test"]))
    return replace(federation, clients=clients)
