"""Draw cohorts, dropouts, newcomers and evaluated clients, each from the seed alone."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import ConfigError
from ..core.settings import Settings
from ..core.streams import Stream
from ..data import Federation
from ..data.federated import FederationInfo

EVALUATE_ALL_UP_TO, DEFAULT_EVAL_CLIENTS = 10_000, 1_000
"""Number of clients up to which all are evaluated by default, and the number evaluated of more clients."""


def sample_cohort(settings: Settings, n_clients: int, r: int) -> Tensor:
    """Draw the cohort of round r, sorted, from the seed alone: it is the same for every algorithm."""
    rng = np.random.default_rng([settings.seed, Stream.COHORT, r])
    return torch.from_numpy(
        np.sort(rng.choice(n_clients, settings.participation.cohort_size(n_clients), replace=False))
    )


def count_cohorts(settings: Settings, n_clients: int, rounds: int) -> NDArray[np.int64]:
    """Count in how many cohorts of the first rounds each client is (N,)."""
    if settings.participation.cohort_size(n_clients) == n_clients:
        return np.full(n_clients, rounds, dtype=np.int64)
    counts = np.zeros(n_clients, dtype=np.int64)
    for r in range(1, rounds + 1):
        counts[sample_cohort(settings, n_clients, r).numpy()] += 1
    return counts


def sample_dropouts(settings: Settings, n_clients: int, r: int) -> Tensor:
    """Draw, from the seed alone, the clients (N,) bool that drop out in round r if they are in its cohort."""
    if not settings.participation.drop_out:
        return torch.from_numpy(np.zeros(n_clients, dtype=np.bool_))  # takes no memory before it is written
    rng = np.random.default_rng([settings.seed, Stream.DROPOUT, r])
    return torch.from_numpy(rng.random(n_clients) < settings.participation.drop_out)


def sample_eval_ids(
    settings: Settings, federation: Federation | FederationInfo, excluded: Sequence[int] = ()
) -> Tensor:
    """Draw the clients that are evaluated, sorted: the same in every round and for every method and seed."""
    n = federation.n_clients
    n_evaluated = settings.evaluation.clients or (n if n <= EVALUATE_ALL_UP_TO else DEFAULT_EVAL_CLIENTS)
    if n_evaluated >= n - len(excluded):
        return torch.from_numpy(np.setdiff1d(np.arange(n), excluded)) if excluded else torch.arange(n)
    rng = np.random.default_rng([get_split_seed(federation), Stream.EVALUATION])
    candidates = np.setdiff1d(np.arange(n), excluded) if excluded else n
    return torch.from_numpy(np.sort(rng.choice(candidates, n_evaluated, replace=False)))


def sample_newcomers(settings: Settings, federation: Federation) -> list[int]:
    """Draw the clients that take no part in training and join afterwards, sorted.

    The seed of the split draws them, so that runs with several seeds hold out the same clients.
    """
    n = federation.n_clients
    if settings.participation.held_out >= n:
        raise ConfigError(
            f"held_out: got {settings.participation.held_out}, expected fewer than the {n} clients that there are"
        )
    rng = np.random.default_rng([get_split_seed(federation), Stream.NEWCOMERS])
    return sorted(int(i) for i in rng.choice(n, settings.participation.held_out, replace=False))


def get_split_seed(federation: Federation | FederationInfo) -> int:
    """Return the seed that made the partition."""
    return int(federation.partition.get("seed") or 0)
