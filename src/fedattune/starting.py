"""A method and its server made ready for one model, before the first round."""

from dataclasses import replace

import torch

from .config import Settings
from .core import Algorithm, State
from .params import Params
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
    """The server's first state, its random parts drawn from the seed alone, and the tensors that are shared."""
    shared = task.params.without(algorithm.personal.names(task.model))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return algorithm.server.init(shared, n_clients), shared
