"""Clients that join after training: what they are given, and what they make of it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .algorithms.local import local
from .cohorts import usable_device
from .config import OF_RAY, Settings
from .core import Algorithm, Payload, ServerUpdate, State
from .data import Federation, federation
from .errors import DataError, RunError
from .params import Params
from .personal_models import algorithm_of, rebuilt, wrapped
from .rooms import Room, gathered, row_bytes
from .rounds import Run
from .runs import restore
from .runs.folder import RunFolder
from .starting import fitted, start_server
from .task import Task

if TYPE_CHECKING:
    from .result import Result


@dataclass(frozen=True)
class Remains:
    """What is left of a run for clients that join: the method, the model it trains, and the server's state.

    `model` is the user's model with its initial weights, `trained` what the method makes of it, `statistics` the
    averaged BatchNorm statistics, where they are averaged.
    """

    algorithm: Algorithm
    model: nn.Module
    trained: nn.Module
    server: State
    statistics: Params
    n_clients: int


@dataclass(frozen=True)
class Joining(ServerUpdate):
    """The server as clients meet it that join after training; it learns about them and forgets nobody."""

    learns: ClassVar[bool] = False

    server: ServerUpdate
    trained: State
    n_before: int

    def init(self, w0: Params, n_clients: int) -> State:
        """The trained state with the new clients added."""
        return self.server.join(self.trained, n_clients)

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """What the server sends to new clients."""
        return self.server.broadcast(state, ids + self.n_before)

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Learn about the new clients alone."""
        return self.server.absorb(state, ids + self.n_before, sent, received, n)


def join(remains: Remains, clients: Federation, config: Mapping[str, Any], rounds: int) -> "Result":
    """What new clients reach: on arrival, after `rounds` rounds of their own, and by training alone for as many.

    A client is first sent what the server has for a newcomer, then it trains like any other. The server learns
    from its uploads only what concerns the client itself, its place in the mixing: what the others are sent
    never changes. `config` is that of the run.

    Raises:
        ConfigError: `rounds` is no number of rounds, or the server keeps too much of other clients.
        DivergedError: training diverged on all of them.

    """
    before = {k: v for k, v in config.items() if k in Settings.model_fields}
    changed = {
        "rounds": rounds,
        "cohort": 1.0,
        "drop_out": 0.0,
        "held_out": 0,
        "eval_every": rounds,
        "eval_clients": None,
        "client_state": "memory",
        # The few clients that join are trained in this process.
        **({"engine": "auto", **OF_RAY} if before.get("engine") == "ray" else {}),
    }
    mine = Settings.checked(**{**before, **changed})
    remains = replace(remains, server=gathered(remains.server))
    config = {**config, "data": clients.name, **mine.model_dump()}
    method = remains.algorithm
    joining = replace(
        method,
        server=Joining(method.server, remains.server, remains.n_clients),
        bn_buffers="local",
        full_participation=False,
        notes=(),
    )
    module = _with(remains.trained, {**method.server.newcomer(remains.server), **remains.statistics})
    run = Run(joining, clients, module, mine, config, None)
    run.evaluate_arrival()
    result = run.go(lambda _: None, lambda: False)
    alone = Run(local(), clients, copy.deepcopy(remains.model), mine, config, None).go(
        lambda _: None, lambda: False
    )
    arrival = next(
        correct / n for r, point, (n, correct, _) in run.store.scores("test") if point == "received"
    )
    newcomers = [
        {
            "id": joined.id,
            "n_train": joined.n_train,
            "n_test": joined.n_test,
            "received": float(first),
            "trained": joined.trained,
            "local": by_itself.trained,
        }
        for joined, by_itself, first in zip(result.clients, alone.clients, arrival, strict=True)
    ]
    return replace(result, facts={**result.facts, "newcomers": newcomers})


def personalize(
    result: "Result",
    data: Federation | Sequence[Any] | Mapping[str, Any],
    rounds: int,
    algorithm: Algorithm | None,
    module: nn.Module | None,
) -> "Result":
    """See `Result.personalize`."""
    shape, classes = tuple(result.facts["input_shape"]), tuple(result.facts["classes"])
    clients = data if isinstance(data, Federation) else federation(data, classes=classes, fewest=1)
    if clients.input_shape != shape or clients.classes != classes:
        raise DataError(
            f"the new clients' data do not fit the run: got inputs of shape {clients.input_shape} and the classes "
            f"{', '.join(clients.classes)}, expected {shape} and {', '.join(classes)}"
        )
    if result.remains:
        return join(result.remains, clients, result.config, rounds)
    config = {**result.config, "device": str(usable_device(result.settings))}
    return join(_reopened(result, config, clients, algorithm, module), clients, config, rounds)


def _reopened(
    result: "Result",
    config: Mapping[str, Any],
    clients: Federation,
    algorithm: Algorithm | None,
    module: nn.Module | None,
) -> Remains:
    """What is left of a run, from its folder."""
    if result.folder is None:
        raise RunError(
            "this run was not finished, or was kept neither in memory nor in a folder: no client can join it"
        )
    settings = result.settings
    method = fitted(algorithm or algorithm_of(config), settings)
    model = module or rebuilt({**config, **result.facts})
    network = method.network
    trained = wrapped(network, model, sample(clients), settings.seed) if network else copy.deepcopy(model)
    task = Task(trained).to(torch.device(config["device"]), getattr(torch, settings.dtype))
    n = result.n_clients
    template, shared = start_server(method, task, n, settings.seed)
    averaged = task.bn_statistics if method.bn_buffers == "average" and shared else ()
    folder = RunFolder(result.folder)
    flat = folder.checkpoints.last().flat
    template = Room.choose(settings, n, row_bytes(method, task, template), folder.rows).settle(template)
    tree = restore(
        {"server": template, "clients": {"common": task.buffers.only(averaged)}}, flat, rows=folder.rows
    )
    return Remains(method, model, task.model, tree["server"], tree["clients"]["common"], n)


def sample(clients: Federation) -> Tensor:
    """Some inputs (B, ...) to check a model with."""
    return clients.features(torch.as_tensor(clients.part("train")[0][:4], device=clients.device)).cpu()


def _with(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module with these parameters and buffers; those that are not named stay."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
    return copied
