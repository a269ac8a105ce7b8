"""Two classes per client, with chunks of very unequal size."""

from typing import Literal

import numpy as np

from ...core.citing import cite
from ...core.errors import DataError
from ..splits import group_rows
from ..types import Array, Index

LEGACY_SEEDS = 2**32
"""Number of seeds of NumPy's legacy generator."""


@cite("dinh2020personalized", "guo2023fedmcsa")
def two_class(labels: Array, n_clients: int, seed: int, *, protocol: Literal["A", "B"] = "A") -> list[Index]:
    """Two classes per client, with chunks of very unequal size (pFedMe, FedMCSA).

    Every class is cut into 2 N / classes chunks at random. Client u gets the chunks 2u and 2u+1; the first chunk of
    every class counts first, then the second of every class, and so on.

    Args:
        protocol: "A" (the code of FedMCSA) hands out disjoint slices of the classes. "B" (the first public pFedMe
            generator) gives client u the classes u and u+1 and starts every slice near the first sample, so clients
            overlap.

    Source: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
    """
    if not 0 <= seed < LEGACY_SEEDS:
        raise DataError(f"two_class needs a seed of at least 0 and below 2**32, got {seed}; take another seed")
    by_class = group_rows(labels)
    n_classes = len(by_class)
    n_chunks, rest = divmod(2 * n_clients, n_classes)
    if rest or n_chunks < 2:
        step = n_classes if n_classes % 2 else n_classes // 2
        fits = ", ".join(str(n) for n in range(step, 8 * step + 1, step) if n >= n_classes)
        raise DataError(
            f"two_class cannot deal {n_classes} classes to {n_clients} clients, because every class is cut "
            f"into 2 x clients / classes chunks, a whole number of at least 2; clients that work: {fits}, ..."
        )
    sizes = _chunk_sizes([len(rows) for rows in by_class], n_chunks, seed)  # (classes, chunks)
    deal = sizes.T.reshape(-1)  # chunk-major
    if protocol == "A":
        ends = sizes.cumsum(axis=1)
        chunks = [by_class[c][ends[c, k] - sizes[c, k] : ends[c, k]] for k, c in np.ndindex(sizes.T.shape)]
        return [np.concatenate(chunks[2 * u : 2 * u + 2]) for u in range(n_clients)]
    # Protocol B has a truth value where a position was meant: a slice starts at 0 or 1.
    starts = np.zeros(n_classes, dtype=bool)
    clients = []
    for u in range(n_clients):
        slices = []
        for c, size in ((u % n_classes, deal[2 * u]), ((u + 1) % n_classes, deal[2 * u + 1])):
            slices.append(by_class[c][int(starts[c]) : size])
            starts[c] = True
        clients.append(np.concatenate(slices))
    return clients


def _chunk_sizes(totals: list[int], n_chunks: int, seed: int) -> Array:
    """Cut every total into chunks; all but the last take between a fifth and a half of the rest."""
    random = np.random.RandomState(seed)
    sizes = np.zeros((len(totals), n_chunks), dtype=np.int64)
    for c, total in enumerate(totals):
        rest = total
        for k in range(n_chunks - 1):
            if rest // 5 < rest // 2:
                sizes[c, k] = random.randint(rest // 5, rest // 2)
            rest -= sizes[c, k]
        sizes[c, -1] = rest
        if sizes[c].min() < 1:
            raise DataError(
                f"two_class cannot cut class {c} with {total} samples into {n_chunks} chunks; take fewer clients"
            )
    return sizes
