"""Sort and partition: samples sorted by label, cut into shards, and a few shards for every client."""

from typing import Literal

import numpy as np

from ...core.citing import cite
from ...core.errors import DataError
from ...core.options import Count
from ..types import Array, Index

MAX_SWAPS = 100
"""Number of swaps to try per shard or class that is dealt."""


@cite("mcmahan2017communication", "huang2021behavior")
def shards(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    shards_per_client: Count = 2,
    distinct: bool = True,
    deal: Literal["random", "paired"] = "random",
) -> list[Index]:
    """Samples sorted by label, cut into equal shards, and `shards_per_client` of them for each client.

    A shard has the label of most of its samples. Samples that the number of shards does not divide are left out at
    random.

    Args:
        deal: "random" deals without replacement. "paired" gives the clients neighbouring labels in order, so that
            the clients of a group hold the same labels: (0,1), (0,1), (2,3), (2,3), ...

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
    2017, section 3; Huang et al., IGFL, IJCAI 2021, section 5, asks for different labels.
    """
    n_shards = n_clients * shards_per_client
    size = len(labels) // n_shards
    if not size:
        raise DataError(
            f"{len(labels)} samples cannot be cut into {n_shards} shards, {shards_per_client} for each of "
            f"{n_clients} clients; take fewer clients or a smaller shards.shards_per_client"
        )
    random = np.random.default_rng(seed)
    samples = np.sort(random.permutation(len(labels))[: n_shards * size])
    order = samples[np.argsort(labels[samples], kind="stable")].reshape(n_shards, size)
    own = np.array([np.bincount(labels[rows]).argmax() for rows in order])  # the label of each shard
    if deal == "paired":
        dealt = _deal_paired(own, n_clients, shards_per_client)
    else:
        dealt = random.permutation(n_shards).reshape(n_clients, shards_per_client)
        if distinct:
            most = int(np.bincount(own).argmax())
            if (times := int((own == most).sum())) > n_clients:
                raise DataError(
                    f"{times} of {n_shards} shards have the label {most}, so {n_clients} clients cannot all have "
                    "different labels; take a smaller shards.shards_per_client or shards.distinct=false"
                )
            dealt = make_distinct(dealt, own, random)
    return [order[mine].reshape(-1) for mine in dealt]


def _deal_paired(own: Array, n_clients: int, per_client: int) -> Array:
    """Deal shards with the labels `own` in pairs, (N, per_client)."""
    n_labels = int(own.max()) + 1
    each, rest = divmod(len(own), n_labels)
    times = np.bincount(own)
    if rest or n_labels % per_client or (own != np.repeat(np.arange(n_labels), each)).any():
        raise DataError(
            f"the paired deal of {per_client} shards to {n_clients} clients needs labels in groups of "
            f"{per_client} and equally many shards of each, but there are {n_labels} labels with {times.min()} to "
            f"{times.max()} shards; take another number of clients, or shards.deal=random"
        )
    grouped = np.arange(len(own)).reshape(-1, per_client, each)  # (groups, labels of a group, its clients)
    return grouped.transpose(0, 2, 1).reshape(n_clients, per_client)


def make_distinct(dealt: Array, own: Array, random: np.random.Generator) -> Array:
    """Swap numbers (N, k) between clients until no client has two with the same label in `own`.

    No label may occur more than N times. A swap is kept when it makes no more repeats.
    """
    dealt = dealt.copy()
    n_clients, k = dealt.shape
    times = np.zeros((n_clients, own.max() + 1), dtype=np.int64)  # how often client u has the label c
    np.add.at(times, (np.arange(n_clients).repeat(k), own[dealt].reshape(-1)), 1)
    for _ in range(MAX_SWAPS * dealt.size):
        repeated = np.argwhere(times[np.arange(n_clients)[:, None], own[dealt]] > 1)
        if not len(repeated):
            return dealt
        u, i = repeated[random.integers(len(repeated))]
        v, j = random.integers(n_clients), random.integers(k)
        a, b = own[dealt[u, i]], own[dealt[v, j]]
        if u == v or a == b or int(times[u, b] > 0) + int(times[v, a] > 0) > 1 + int(times[v, b] > 1):
            continue  # no change, or more repeats than before
        times[u, a] -= 1
        times[u, b] += 1
        times[v, b] -= 1
        times[v, a] += 1
        dealt[u, i], dealt[v, j] = dealt[v, j], dealt[u, i]
    raise DataError(
        f"no deal of {k} different labels to each of {n_clients} clients was found; take another seed, or fewer "
        "labels for each client"
    )
