"""Who is asked in which round, and on what device: what is settled before the first round."""

import numpy as np
import torch
from torch import Tensor

from .census import Census
from .config import Settings
from .data import Federation
from .errors import ConfigError

COHORTS, TRAINING, ADAPTATION, ABSENCE, HELD_OUT, EVALUATED = 1, 2, 3, 4, 5, 6
"""Streams of random numbers drawn from one seed."""


EVALUATE_ALL, EVALUATE_SOME = 10_000, 1_000
"""Of more clients than the first number only the second many are evaluated, unless the settings say how many."""


def check_device(settings: Settings) -> None:
    """Check that the device is here, and that it can do what it is asked for.

    Raises:
        ConfigError: it is not, or it cannot.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but PyTorch finds no CUDA device here; use cpu or auto")
    if settings.mixed_precision == "off":
        return
    if settings.dtype != "float32":
        raise ConfigError(
            f"mixed_precision: {settings.mixed_precision} goes with dtype float32, got {settings.dtype}"
        )
    where = device(settings).type
    if not (torch.cuda.is_bf16_supported() if where == "cuda" else _cpu_has_bfloat16()):
        raise ConfigError(
            f"mixed_precision: the {where} here has no {settings.mixed_precision} arithmetic; leave it off"
        )


def _cpu_has_bfloat16() -> bool:
    return any(found for name, found in torch.cpu.get_capabilities().items() if "bf16" in name)


def device(settings: Settings) -> torch.device:
    """The device that `settings` names; `auto` is CUDA where there is one."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def usable_device(settings: Settings) -> torch.device:
    """The device that `settings` names if it is here, else what `auto` finds."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device(settings)


def cohort(settings: Settings, n_clients: int, r: int) -> Tensor:
    """The clients asked in round r, sorted; drawn from the seed alone, so the same for every algorithm."""
    rng = np.random.default_rng([settings.seed, COHORTS, r])
    return torch.from_numpy(np.sort(rng.choice(n_clients, settings.cohort_size(n_clients), replace=False)))


def absent(settings: Settings, n_clients: int, r: int) -> Tensor:
    """(N,) which clients would drop out in round r, if they were asked; from the seed alone."""
    if not settings.drop_out:
        return torch.from_numpy(np.zeros(n_clients, dtype=np.bool_))  # takes no memory before it is written
    rng = np.random.default_rng([settings.seed, ABSENCE, r])
    return torch.from_numpy(rng.random(n_clients) < settings.drop_out)


def evaluated(settings: Settings, federation: Federation | Census) -> Tensor:
    """The clients that are evaluated, sorted: the same in every round and for every method and seed."""
    n = federation.n_clients
    few = settings.eval_clients or (n if n <= EVALUATE_ALL else EVALUATE_SOME)
    if few >= n:
        return torch.arange(n)
    rng = np.random.default_rng([_split_seed(federation), EVALUATED])
    return torch.from_numpy(np.sort(rng.choice(n, few, replace=False)))


def held_out(settings: Settings, federation: Federation) -> list[int]:
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
    rng = np.random.default_rng([_split_seed(federation), HELD_OUT])
    return sorted(int(i) for i in rng.choice(n, settings.held_out, replace=False))


def _split_seed(federation: Federation | Census) -> int:
    return int(federation.partition.get("seed") or 0)
