"""Which client is trained when: clients with few steps follow one another while others still have theirs to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """Clients in lanes that run side by side; each lane trains its clients one after the other.

    Attributes:
        clients: per lane, its clients in their order.
        changes: step -> lanes in which a client has done its last step before it.
        steps: number of steps of the longest lane.

    """

    clients: list[list[int]]
    changes: dict[int, list[int]]
    steps: int

    @property
    def alike(self) -> bool:
        """Whether every lane trains one client, all with as many steps."""
        return all(len(lane) == 1 for lane in self.clients) and list(self.changes) in ([], [self.steps])


def lay(counts: Sequence[int], at_once: int = 1) -> list[Lanes]:
    """Lanes for clients with so many local steps each, divided into groups, `at_once` of them if there are enough.

    As many lanes as it takes to finish with the client that has the most steps, or more, so that all groups have as
    many; all are about as long. Clients without a step are in none.
    """
    longest, clients = max(counts), sum(n > 0 for n in counts)
    width = clients if min(counts) == longest else ceil(sum(counts) / longest)
    width = min(clients, at_once * ceil(width / at_once))
    lanes: list[list[int]] = [[] for _ in range(width)]
    loads = [(0, lane) for lane in range(width)]
    heapify(loads)
    for client in sorted(
        range(len(counts)), key=lambda i: -counts[i]
    ):  # stable: equal clients keep their order
        if not counts[client]:
            break
        load, lane = loads[0]
        lanes[lane].append(client)
        heapreplace(loads, (load + counts[client], lane))
    groups = min(at_once, width)
    cuts = [width * i // groups for i in range(groups + 1)]
    return [_lanes(lanes[start:stop], counts) for start, stop in pairwise(cuts)]


def _lanes(clients: list[list[int]], counts: Sequence[int]) -> Lanes:
    changes: dict[int, list[int]] = {}
    for number, lane in enumerate(clients):
        for done in accumulate(counts[i] for i in lane):
            changes.setdefault(done, []).append(number)
    return Lanes(clients, changes, max(changes))


def laid_out(lanes: Lanes, batches: Sequence[Index]) -> Index:
    """Sample numbers (steps, lanes, per step, batch), -1 where there are none.

    A lane that has nothing left repeats its last step, whose result nobody takes.
    """
    per_step, size = batches[0].shape[1], max(b.shape[2] for b in batches)
    index = np.full((lanes.steps, len(lanes.clients), per_step, size), -1, dtype=np.int64)
    for number, lane in enumerate(lanes.clients):
        at = 0
        for client in lane:
            own = batches[client]
            index[at : at + len(own), number, :, : own.shape[2]] = own
            at += len(own)
        index[at:, number] = index[at - 1, number]
    return index
