"""Partitions by Dirichlet distributions: over the clients of each class, or over the classes of each client."""

from typing import Literal

import numpy as np

from ...core.citing import cite
from ...core.errors import DataError
from ...core.options import Count, Positive
from ..splits import group_rows
from ..types import Array, Index


@cite("""
@inproceedings{li2022federated,
  author = {Li, Qinbin and Diao, Yiqun and Chen, Quan and He, Bingsheng},
  title = {Federated Learning on Non-{IID} Data Silos: An Experimental Study},
  booktitle = {IEEE International Conference on Data Engineering (ICDE)},
  year = {2022},
  eprint = {2102.02079},
  archiveprefix = {arXiv}
}
""")
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

    Clients that hold n/N samples or more get none of the following classes. The division is drawn again until every
    client has `min_size` samples. If `max_tries` draws do not suffice, the draw with the largest smallest client is
    repaired: each client that lacks samples takes them from the largest client, of a class that both hold if there is
    one, else of that client's largest class.

    Args:
        min_size: minimum number of samples per client, by default min(40, n/N/2). Here 40 is batch size 10 over a test
            quarter, so FedAM's and FedCP's rule for another batch size B is `min_size` = 4 B.

    Source: Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022; PFLlib, dataset_utils.
    """
    n = len(labels)
    min_samples = min(40, n / n_clients / 2) if min_size is None else min_size
    if n_clients > n or min_samples > n / n_clients:
        raise DataError(
            f"{n} samples cannot give {n_clients} clients {max(min_samples, 1):g} samples each; "
            "take fewer clients or a smaller dirichlet.min_size"
        )
    by_class = group_rows(labels)
    random = np.random.default_rng(seed)
    counts, best = None, -1
    for _ in range(max_tries):
        drawn = _dirichlet_counts([len(rows) for rows in by_class], n_clients, beta, random)
        if drawn is not None and (smallest := int(drawn.sum(axis=0).min())) > best:
            counts, best = drawn, smallest
            if best >= max(min_samples, 1):
                break
    if counts is None:
        raise DataError(
            f"dirichlet found no division in {max_tries} tries, because all shares of a class fell on clients that had "
            "enough; take fewer clients, a larger dirichlet.beta or more dirichlet.max_tries"
        )
    _fill_up(counts, int(np.ceil(max(min_samples, 1))))
    cuts = counts.cumsum(axis=1)[:, :-1]
    dealt = [np.split(random.permutation(rows), cut) for rows, cut in zip(by_class, cuts, strict=True)]
    return [np.concatenate(pieces) for pieces in zip(*dealt, strict=True)]


def _dirichlet_counts(totals: list[int], n_clients: int, beta: float, random: np.random.Generator) -> Array | None:
    """Draw samples per class and client, (classes, N); None when all shares of a class fall on full clients."""
    full, concentrations = sum(totals) / n_clients, np.full(n_clients, beta)
    counts = np.zeros((len(totals), n_clients), dtype=np.int64)
    n_samples = np.zeros(n_clients, dtype=np.int64)
    for c, total in enumerate(totals):
        share = random.dirichlet(concentrations) * (n_samples < full)
        if not (sum_of_shares := share.sum()) > 0:
            return None
        counts[c] = (share / sum_of_shares).cumsum() * total  # the ends, rounded down
        counts[c, -1] = total  # rounding may leave the last sum just below 1
        counts[c, 1:] -= counts[c, :-1].copy()
        n_samples += counts[c]
    return counts


def _fill_up(counts: Array, minimum: int) -> None:
    """Move samples from the largest clients until each client of `counts` (classes, N) has the minimum."""
    sizes = counts.sum(axis=0)
    while sizes.min() < minimum:
        needy, donor = sizes.argmin(), sizes.argmax()
        shared = counts[:, donor] * (counts[:, needy] > 0)
        available = shared if shared.any() else counts[:, donor]
        c = available.argmax()
        moved = min(minimum - sizes[needy], sizes[donor] - minimum, available[c])
        counts[c, needy] += moved
        counts[c, donor] -= moved
        sizes = counts.sum(axis=0)


@cite("hsu2019measuring")
def dirichlet_clients(
    labels: Array,
    n_clients: int,
    seed: int,
    *,
    rho: Positive = 0.1,
    convention: Literal["symmetric", "prior"] = "symmetric",
) -> list[Index]:
    """Equal clients, each drawing its samples by class probabilities q ~ Dirichlet; small rho: few classes each.

    Client after client draws floor(n/N) times a class from its q and takes an unused sample of the class. An exhausted
    class is removed from all q, which are then renormalised. A client whose classes are all exhausted goes on with
    the prior.

    Args:
        convention: "symmetric" uses rho for each of the K classes. "prior" uses rho times the uniform prior, rho/K,
            which is IGFL's text read by the letter.

    Source: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, arXiv:1909.06335; Huang et al., IGFL, IJCAI 2021, section 5.
    """
    size = len(labels) // n_clients
    if not size:
        raise DataError(f"{len(labels)} samples cannot be divided among {n_clients} clients; take fewer clients")
    random = np.random.default_rng(seed)
    by_class = [random.permutation(rows) for rows in group_rows(labels)]
    n_classes = len(by_class)
    q = random.dirichlet(np.full(n_classes, rho if convention == "symmetric" else rho / n_classes), n_clients)
    stock = np.array([len(rows) for rows in by_class])
    starts = np.zeros(n_classes, dtype=np.int64)
    clients = []
    for u in range(n_clients):
        counts = _draw_counts(q[u], stock, size, random)
        clients.append(np.concatenate([by_class[c][starts[c] : starts[c] + counts[c]] for c in range(n_classes)]))
        starts += counts
        stock -= counts
    return clients


def _draw_counts(q: Array, stock: Array, n: int, random: np.random.Generator) -> Array:
    """Return how many samples of each class n draws from q take, (K,), none more often than `stock` says.

    Draws are made together up to the draw that exhausts a class. The result equals single draws one after the other.
    """
    counts = np.zeros(len(q), dtype=np.int64)
    while (missing := n - int(counts.sum())) > 0:
        rest = stock - counts
        p = q * (rest > 0)
        if not p.sum() > 0:
            p = (rest > 0).astype(np.float64)
        draws = random.choice(len(q), size=missing, p=p / p.sum())
        new_counts = np.bincount(draws, minlength=len(q))
        empty_classes = np.flatnonzero((new_counts >= rest) & (rest > 0))
        if len(empty_classes):
            first = min(np.flatnonzero(draws == c)[rest[c] - 1] for c in empty_classes)
            new_counts = np.bincount(draws[: first + 1], minlength=len(q))
        counts += new_counts
    return counts
