"""Ways to divide labelled samples among clients.

A partition takes the labels (n,), the number of clients N and a seed, and returns N index arrays. Its
keyword-only parameters are the user's options.

Clients of equal size, each with class probabilities of its own from a Dirichlet distribution.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...core.errors import DataError
from ...core.options import Count, Positive
from ..splits import group_rows
from ..types import Array, Index
from .pfedla import pfedla, pfedla_similarity
from .shards import shards


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
    by_class = [random.permutation(rows) for rows in group_rows(labels)]
    n_classes = len(by_class)
    q = random.dirichlet(np.full(n_classes, rho if convention == "symmetric" else rho / n_classes), n_clients)
    left = np.array([len(rows) for rows in by_class])
    used = np.zeros(n_classes, dtype=np.int64)
    clients = []
    for u in range(n_clients):
        counts = _draw_counts(q[u], left, size, random)
        clients.append(np.concatenate([by_class[c][used[c] : used[c] + counts[c]] for c in range(n_classes)]))
        used += counts
        left -= counts
    return clients


def _draw_counts(q: Array, left: Array, n: int, random: np.random.Generator) -> Array:
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


LEGACY_SEEDS = 2**32  # of NumPy's legacy generator


def two_class(labels: Array, n_clients: int, seed: int, *, protocol: Literal["A", "B"] = "A") -> list[Index]:
    """Two classes per client, with chunks of very unequal size (pFedMe, FedMCSA).

    Every class is cut into 2 N / classes chunks at random; client u gets the chunks 2u and 2u+1, counted
    through the first chunk of every class, then the second of every class, and so on. Protocol A (the code of
    FedMCSA) hands out disjoint slices of these classes. Protocol B (the first public pFedMe generator) gives
    client u the classes u and u+1 and starts every slice near the first sample, so clients overlap.

    Source: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

    Raises:
        DataError: 2 N / classes is no whole number of at least 2, a class is too small to be cut, or the seed
            is too large.

    """
    if not 0 <= seed < LEGACY_SEEDS:
        raise DataError(
            f"two_class needs a seed of at least 0 and below 2**32, got {seed}; take a smaller one"
        )
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
    used = np.zeros(n_classes, dtype=bool)  # a truth value where a position was meant: starts are 0 or 1
    clients = []
    for u in range(n_clients):
        slices = []
        for c, size in ((u % n_classes, deal[2 * u]), ((u + 1) % n_classes, deal[2 * u + 1])):
            slices.append(by_class[c][int(used[c]) : size])
            used[c] = True
        clients.append(np.concatenate(slices))
    return clients


def _chunk_sizes(totals: list[int], n_chunks: int, seed: int) -> Array:
    """Cut every total into chunks: all but the last take between a fifth and a half of what is left."""
    random = np.random.RandomState(seed)
    sizes = np.zeros((len(totals), n_chunks), dtype=np.int64)
    for c, total in enumerate(totals):
        left = total
        for k in range(n_chunks - 1):
            if left // 5 < left // 2:
                sizes[c, k] = random.randint(left // 5, left // 2)
            left -= sizes[c, k]
        sizes[c, -1] = left
        if sizes[c].min() < 1:
            raise DataError(
                f"two_class cannot cut class {c} with {total} samples into {n_chunks} chunks; "
                "take fewer clients"
            )
    return sizes


def dirichlet(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    beta: Positive = 0.1,
    min_size: Count | None = None,
    max_tries: Count = 1000,
) -> list[Index]:
    """Every class dealt to the clients in Dirichlet(beta) shares; small beta: few classes each (PFLlib).

    Clients that hold n/N samples or more get none of the following classes. It is drawn again until every
    client has `min_size` samples; by default min(40, n/N/2), where 40 is batch size 10 over a test quarter, so
    FedAM's and FedCP's rule for another batch size B is `min_size` = 4 B.

    Source: Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022; PFLlib, dataset_utils.

    Raises:
        DataError: more clients than samples, or not reached within `max_tries` draws.

    """
    n = len(labels)
    least = min(40, n / n_clients / 2) if min_size is None else min_size
    if n_clients > n or least > n / n_clients:
        raise DataError(
            f"{n} samples cannot give {n_clients} clients {max(least, 1):g} samples each; "
            "take fewer clients or a smaller dirichlet.min_size"
        )
    by_class = group_rows(labels)
    random = np.random.default_rng(seed)
    best = -1
    for _ in range(max_tries):
        counts = _dirichlet_counts([len(rows) for rows in by_class], n_clients, beta, random)
        if counts is not None:
            best = max(best, int(counts.sum(axis=0).min()))
            if best >= max(least, 1):
                break
    else:
        raise DataError(
            f"dirichlet found no division in {max_tries} tries where each of the {n_clients} clients has "
            f"{max(least, 1):g} samples (the smallest client had at most {max(best, 0)}); take fewer "
            "clients, a larger dirichlet.beta, a smaller dirichlet.min_size or more dirichlet.max_tries"
        )
    assert counts is not None
    cuts = counts.cumsum(axis=1)[:, :-1]
    dealt = [np.split(random.permutation(rows), cut) for rows, cut in zip(by_class, cuts, strict=True)]
    return [np.concatenate(pieces) for pieces in zip(*dealt, strict=True)]


def _dirichlet_counts(
    totals: list[int], n_clients: int, beta: float, random: np.random.Generator
) -> Array | None:
    """Samples per class and client (classes, N), or None when all shares of a class fall on full clients."""
    full = sum(totals) / n_clients
    counts = np.zeros((len(totals), n_clients), dtype=np.int64)
    held = np.zeros(n_clients, dtype=np.int64)
    for c, total in enumerate(totals):
        share = random.dirichlet(np.full(n_clients, beta)) * (held < full)
        if not share.sum() > 0:
            return None
        ends = np.floor(np.cumsum(share / share.sum()) * total).astype(np.int64)
        ends[-1] = total  # rounding may leave the last sum just below 1
        counts[c] = np.diff(ends, prepend=0)
        held += counts[c]
    return counts


def iid(labels: Array, n_clients: int, seed: int) -> list[Index]:
    """Equal shares at random, all clients alike.

    Raises:
        DataError: more clients than samples.

    """
    if n_clients > len(labels):
        raise DataError(f"{len(labels)} samples cannot be divided among {n_clients} clients; take fewer")
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(order, n_clients)


def by_column(labels: Array, n_clients: int, _seed: int) -> list[Index]:
    """The data's own clients, such as a table's client column.

    `labels` holds the client of each sample here, (n,) in [0, N).
    """
    return group_rows(labels, n_clients)


PARTITIONS: dict[str, Callable[..., list[Any]]] = {
    "dirichlet": dirichlet,
    "dirichlet_clients": dirichlet_clients,
    "two_class": two_class,
    "shards": shards,
    "pfedla": pfedla,
    "pfedla_similarity": pfedla_similarity,
    "iid": iid,
    "by_column": by_column,
}
"""name -> partition of labels, a number of clients and a seed."""


DEFAULT_SEEDS = {"two_class": 1}  # the others: 0
"""Partitions whose seed is another one than 0 where none is given."""


DEFAULT_CLIENTS = {"pfedla_similarity": 8}  # the others: by the data


STRATIFIED = {"pfedla", "pfedla_similarity"}  # every class of a client is divided among its parts alike
