"""Clients that join after training: what they are given, and what they make of it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..algorithms.local import local
from ..core.algorithm import Algorithm, ServerUpdate
from ..core.errors import DataError, RunError
from ..core.hardware import find_usable_device
from ..core.params import Params
from ..core.payload import Broadcast, Payload, ServerState
from ..core.settings import RAY_DEFAULTS, Settings
from ..core.task import Task
from ..data import Federation, federation
from ..models.files import build_algorithm, rebuild_model, wrap_model
from .loop import RoundLoop
from .result import TrainedServer
from .setup import apply_settings, init_server, sample_inputs
from .storage import restore_tree
from .storage.folder import RunFolder
from .storage.rows import RowStorage, load_server_rows, row_bytes

if TYPE_CHECKING:
    from .result import Result


@dataclass(frozen=True)
class NewcomerServer(ServerUpdate):
    """The server as clients meet it that join after training; it learns about them and forgets nobody."""

    should_update: ClassVar[bool] = False

    server: ServerUpdate
    trained: ServerState
    n_before: int

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """The trained state with the new clients added."""
        return self.server.add_clients(self.trained, n_clients)

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Send newcomers what the server has for them; matrices over all clients are of no use to a run of theirs."""
        return Broadcast(self.server.broadcast(state, ids + self.n_before).payload)

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Learn about the new clients alone."""
        return self.server.aggregate_newcomers(state, ids + self.n_before, sent, received, n)


def train_newcomers(
    remains: TrainedServer, clients: Federation, config: Mapping[str, Any], rounds: int
) -> "Result":
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
        **({"engine": "auto", **RAY_DEFAULTS} if before.get("engine") == "ray" else {}),
    }
    mine = Settings.from_keywords(**{**before, **changed})
    remains = replace(remains, server=load_server_rows(remains.server))
    config = {**config, "data": clients.name, **mine.model_dump()}
    method = remains.algorithm
    joining = replace(
        method,
        server=NewcomerServer(method.server, remains.server, remains.n_clients),
        bn_buffers="local",
        full_participation=False,
        notes=(),
    )
    module = _copy_with_values(
        remains.trained, {**method.server.newcomer_model(remains.server), **remains.statistics}
    )
    run = RoundLoop(joining, clients, module, mine, config, None)
    run.evaluate_arrival()
    result = run.go(lambda _: None, lambda: False)
    alone = RoundLoop(local(), clients, copy.deepcopy(remains.model), mine, config, None).go(
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
    clients = data if isinstance(data, Federation) else federation(data, classes=classes, min_clients=1)
    if clients.input_shape != shape or clients.classes != classes:
        raise DataError(
            f"the new clients' data do not fit the run: got inputs of shape {clients.input_shape} and the classes "
            f"{', '.join(clients.classes)}, expected {shape} and {', '.join(classes)}"
        )
    if result.remains:
        return train_newcomers(result.remains, clients, result.config, rounds)
    config = {**result.config, "device": str(find_usable_device(result.settings))}
    return train_newcomers(
        _load_trained_server(result, config, clients, algorithm, module), clients, config, rounds
    )


def _load_trained_server(
    result: "Result",
    config: Mapping[str, Any],
    clients: Federation,
    algorithm: Algorithm | None,
    module: nn.Module | None,
) -> TrainedServer:
    """What is left of a run, from its folder."""
    if result.folder is None:
        raise RunError(
            "this run was not finished, or was kept neither in memory nor in a folder: no client can join it"
        )
    settings = result.settings
    method = apply_settings(algorithm or build_algorithm(config), settings)
    model = module or rebuild_model({**config, **result.facts})
    network = method.network
    trained = (
        wrap_model(network, model, sample_inputs(clients), settings.seed) if network else copy.deepcopy(model)
    )
    task = Task(trained).to(torch.device(config["device"]), getattr(torch, settings.dtype))
    n = result.n_clients
    template, shared = init_server(method, task, n, settings.seed)
    averaged = task.bn_statistics if method.bn_buffers == "average" and shared else ()
    folder = RunFolder(result.folder)
    flat = folder.checkpoints.load_latest().flat
    template = RowStorage.choose(settings, n, row_bytes(method, task, template), folder.rows).allocate_server(
        template
    )
    tree = restore_tree(
        {"server": template, "clients": {"common": task.buffers.only(averaged)}}, flat, rows=folder.rows
    )
    return TrainedServer(method, model, task.model, tree["server"], tree["clients"]["common"], n)


def _copy_with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module with these parameters and buffers; those that are not named stay."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
    return copied
