"""Who is asked in which round, and on what device: what is settled before the first round."""

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.settings import Settings
from ..data import Federation
from ..data.federated import FederationInfo

COHORTS, TRAINING, ADAPTATION, ABSENCE, HELD_OUT, EVALUATED = 1, 2, 3, 4, 5, 6
"""Streams of random numbers drawn from one seed."""


EVALUATE_ALL_UP_TO, DEFAULT_EVAL_CLIENTS = 10_000, 1_000
"""Of more clients than the first number only the second many are evaluated, unless the settings say how many."""


def sample_cohort(settings: Settings, n_clients: int, r: int) -> Tensor:
    """The clients asked in round r, sorted; drawn from the seed alone, so the same for every algorithm."""
    rng = np.random.default_rng([settings.seed, COHORTS, r])
    return torch.from_numpy(np.sort(rng.choice(n_clients, settings.cohort_size(n_clients), replace=False)))


def sample_dropouts(settings: Settings, n_clients: int, r: int) -> Tensor:
    """(N,) which clients would drop out in round r, if they were asked; from the seed alone."""
    if not settings.drop_out:
        return torch.from_numpy(np.zeros(n_clients, dtype=np.bool_))  # takes no memory before it is written
    rng = np.random.default_rng([settings.seed, ABSENCE, r])
    return torch.from_numpy(rng.random(n_clients) < settings.drop_out)


def sample_eval_ids(settings: Settings, federation: Federation | FederationInfo) -> Tensor:
    """The clients that are evaluated, sorted: the same in every round and for every method and seed."""
    n = federation.n_clients
    few = settings.eval_clients or (n if n <= EVALUATE_ALL_UP_TO else DEFAULT_EVAL_CLIENTS)
    if few >= n:
        return torch.arange(n)
    rng = np.random.default_rng([_get_split_seed(federation), EVALUATED])
    return torch.from_numpy(np.sort(rng.choice(n, few, replace=False)))


def sample_newcomers(settings: Settings, federation: Federation) -> list[int]:
    """The clients that take no part in training and join afterwards, sorted.

    They are drawn from the seed of the split, so that runs with several seeds hold out the same.

    Raises:
        ConfigError: none would be left to train.

    """
    n = federation.n_clients
    if settings.held_out >= n:
        raise ConfigError(
            f"held_out: got {settings.held_out}, expected fewer than the {n} clients that there are"
        )
    rng = np.random.default_rng([_get_split_seed(federation), HELD_OUT])
    return sorted(int(i) for i in rng.choice(n, settings.held_out, replace=False))


def _get_split_seed(federation: Federation | FederationInfo) -> int:
    return int(federation.partition.get("seed") or 0)
