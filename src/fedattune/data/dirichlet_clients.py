"""Clients of equal size, each with class probabilities of its own from a Dirichlet distribution."""

from typing import Literal

import numpy as np

from ..errors import DataError
from ..registry import Positive
from .dataset import Array, Index
from .parts import rows_by_value


def dirichlet_clients(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    rho: Positive = 0.1,
    convention: Literal["symmetric", "prior"] = "symmetric",
) -> list[Index]:
    """Equal clients, each drawing its samples by class probabilities q ~ Dirichlet; small rho: few classes each.

    Client after client draws floor(n/N) times a class from its q and takes an unused sample of it; a class
    that is exhausted is removed from all q, and these are renormalised. The concentration is rho for each of
    the K classes (symmetric), or rho times the uniform prior, rho/K (prior, which is IGFL's text read by the
    letter). A client whose classes are all exhausted goes on with the prior.

    Source: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, arXiv:1909.06335; Huang et al., IGFL, IJCAI 2021, section 5.

    Raises:
        DataError: more clients than samples.

    """
    size = len(labels) // n_clients
    if not size:
        raise DataError(f"{len(labels)} samples cannot be divided among {n_clients} clients; take fewer")
    random = np.random.default_rng(seed)
    by_class = [random.permutation(rows) for rows in rows_by_value(labels)]
    n_classes = len(by_class)
    q = random.dirichlet(np.full(n_classes, rho if convention == "symmetric" else rho / n_classes), n_clients)
    left = np.array([len(rows) for rows in by_class])
    used = np.zeros(n_classes, dtype=np.int64)
    clients = []
    for u in range(n_clients):
        counts = _draw(q[u], left, size, random)
        clients.append(np.concatenate([by_class[c][used[c] : used[c] + counts[c]] for c in range(n_classes)]))
        used += counts
        left -= counts
    return clients


def _draw(q: Array, left: Array, n: int, random: np.random.Generator) -> Array:
    """How many samples of each class n draws from q take, (K,), none more often than `left` says.

    Draws are made together up to the one that exhausts a class, which is the same as one after the other.
    """
    counts = np.zeros(len(q), dtype=np.int64)
    while (missing := n - int(counts.sum())) > 0:
        unused = left - counts
        p = q * (unused > 0)
        if not p.sum() > 0:
            p = (unused > 0).astype(np.float64)
        drawn = random.choice(len(q), size=missing, p=p / p.sum())
        taken = np.bincount(drawn, minlength=len(q))
        exhausted = np.flatnonzero((taken >= unused) & (unused > 0))
        if len(exhausted):
            first = min(np.flatnonzero(drawn == c)[unused[c] - 1] for c in exhausted)
            taken = np.bincount(drawn[: first + 1], minlength=len(q))
        counts += taken
    return counts
