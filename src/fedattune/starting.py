"""A method and its server made ready for one model, before the first round."""

from dataclasses import replace

import torch
from torch import Tensor

from .config import Settings
from .core import Algorithm, State
from .errors import ConfigError
from .params import Params
from .rooms import Spare, plain
from .select import Both, Norms
from .task import Task


def fitted(algorithm: Algorithm, settings: Settings) -> Algorithm:
    """The algorithm with what the user decides for all methods alike: who trains, and the BatchNorm policies."""
    personal = algorithm.personal
    if settings.bn_affine == "local" and personal != Norms():
        personal = Both((personal, Norms()))
    return replace(
        algorithm,
        participation=algorithm.participation.forced(settings.train),
        personal=personal,
        bn_buffers=algorithm.bn_buffers or settings.bn_buffers,
    )


def start_server(algorithm: Algorithm, task: Task, n_clients: int, seed: int) -> tuple[State, Params]:
    """The server's first state, its random parts drawn from the seed alone, and the tensors that are shared.

    Copies of one model for every client take no memory yet: see `Room.settle`.
    """
    shared = task.params.without(algorithm.personal.names(task.model))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return plain(algorithm.server.init(Spare(shared), n_clients)), shared


def check_extras(algorithm: Algorithm, server: State, ids: Tensor) -> None:
    """Check that the server sends what the client rule needs.

    Raises:
        ConfigError: it does not.

    """
    sent = algorithm.server.broadcast(server, ids).extra
    missing = sorted({rule for extra, rule in algorithm.client.needs.items() if extra not in sent})
    if missing:
        raise ConfigError(
            f"{type(algorithm.client).__name__} cannot go with {type(algorithm.server).__name__}, which does not send "
            f"what it needs; use the server rule {' and '.join(missing)} (Controls and Displacement go around others)"
        )
