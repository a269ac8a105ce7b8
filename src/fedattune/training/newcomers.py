"""Newcomers: clients that join after training get a model from the server, and make it theirs."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms.local import local
from ..core.algorithm import Algorithm, ServerTraits, ServerUpdate, Storing, change
from ..core.errors import DataError, RunError
from ..core.own_code import is_reference, make_portable
from ..core.params import Params
from ..core.payload import Broadcast, Payload, ServerState
from ..core.settings import RAY_DEFAULTS, UNDISTURBED, Settings
from ..data import Federation, federation_from, infer_schema
from ..data.federated import rescale_target
from ..data.tables.checks import TargetType
from ..data.types import TargetScale
from ..models.files import SOURCE_KEY, build_algorithm, rebuild_model
from ..runs.checkpoint import restore_tree
from ..runs.folder import RunFolder
from ..runs.metrics import score_clients
from ..runs.result import Result, TrainedServer
from ..runs.rows import RowStorage, count_row_bytes, load_server_rows
from ..server.wrapper import ServerWrapper
from .loop import RoundLoop
from .setup import build_trained_module, init_server, make_run_context


@dataclass(frozen=True)
class NewcomerServer(ServerUpdate[Any], Storing):
    """Serve clients that join after training; the state of the trained clients stays.

    Newcomers are numbered after the `n_before` clients that took part in training.
    """

    rule: ServerWrapper[Any]
    trained_state: ServerState
    n_before: int

    @property
    def traits(self) -> ServerTraits:
        return replace(self.rule.traits, should_update=False)

    def init(self, w0: Params, n_clients: int) -> Any:
        state = self.rule.add_clients(self.trained_state, n_clients)
        return change(state, n_trained=torch.tensor(self.n_before))  # for rules that relate all clients

    def broadcast(self, state: Any, ids: Tensor) -> Broadcast:
        """Return the payload of `rule` for newcomers, without matrices, which would be about all clients."""
        return Broadcast(self.rule.broadcast(state, ids + self.n_before).payload)

    def aggregate(self, state: Any, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> Any:
        return self.rule.aggregate_newcomers(state, ids + self.n_before, sent, uploads, n)

    def find_stored(self, state: Any, ids: Tensor) -> Params:
        return self.rule.find_stored(state, ids + self.n_before)


def personalize(
    result: Result,
    data: Federation | Sequence[Any] | Mapping[str, Any],
    *,
    rounds: int = 5,
    algorithm: Algorithm | None = None,
    module: nn.Module | None = None,
) -> Result:
    """Let clients join that took no part in training, and return their results; the run itself does not change.

    A newcomer is sent the method's model for newcomers: the global model, the mean of the clients' models, or a
    generated one. Tensors that never leave a client start as they did for all. The newcomer trains for some rounds of
    its own; if the method mixes client models, it gets a mixture. `newcomers` of the result compares that with
    training alone, and `model` gives the model of each.

    Args:
        result: the finished run.
        data: a Federation, or an argument of `fedattune.federation`.
        rounds: rounds that the newcomers train.
        algorithm: the method, if it is custom and the run was read from its folder.
        module: a custom model with its initial weights, likewise.

    Returns:
        A result about the newcomers alone.

    Raises:
        DataError: the data do not fit the run.
        RunError: the run was not finished, or its model must be given.
    """
    shape, classes = tuple(result.facts["input_shape"]), tuple(result.facts["classes"])
    targets, kind = tuple(result.facts.get("target_names", ())), result.kind
    if isinstance(data, Federation):
        clients = data
    elif kind in ("labels", "numbers"):
        target_type: TargetType = "label" if kind == "labels" else "number"
        clients = federation_from(data, targets=targets, target_type=target_type, min_clients=1)
    else:
        clients = federation_from(data, classes=classes, min_clients=1)
    if clients.input_shape != shape or clients.classes != classes or clients.kind != kind:
        raise DataError(
            f"the new clients' data do not fit the run: got inputs of shape {clients.input_shape} and the classes "
            f"{', '.join(clients.classes)}, expected {shape} and {', '.join(classes)}"
        )
    if (got := clients.labels or clients.outputs) != targets:
        raise DataError(
            f"the new clients' data do not fit the run: got the targets {', '.join(got)}, expected {', '.join(targets)}"
        )
    _check_columns(clients, result)
    clients = _prepare_like_run(clients, result)
    if result.trained_server:
        return train_newcomers(result.trained_server, clients, result.config, rounds)
    wants_gpu = result.settings.execution.device != "cpu"
    config = {**result.config, "device": "cuda" if wants_gpu and torch.cuda.is_available() else "cpu"}
    return train_newcomers(_load_trained_server(result, config, clients, algorithm, module), clients, config, rounds)


def _check_columns(clients: Federation, result: Result) -> None:
    """Refuse a table with other columns than those of the run, or in another order: inputs have no names."""
    expected = None if result.inputs is None else result.inputs.schema
    if expected is None or not expected.columns or clients.schema is None or not clients.schema.columns:
        return
    mine = infer_schema(clients)
    # Dates and units may be written in another way, and the target have another name.
    dates = expected.dates if mine.dates.keys() == expected.dates.keys() else mine.dates
    same = {"target": expected.target, "dates": dates, "units": {**expected.units, **mine.units}}
    try:
        expected.check(mine.model_copy(update=same), "the new clients' table")
    except DataError as error:
        raise DataError(f"{error}; give the columns in the order of the run's table, with the same values") from error


def _prepare_like_run(clients: Federation, result: Result) -> Federation:
    """Scale newcomers' numbers and target by the constants that the clients of the run share, if they share any."""
    constants = None if result.inputs is None else result.inputs.constants
    if constants is not None and len(constants) > 1 and np.array_equal(constants[1:], constants[:-1], equal_nan=True):
        clients = clients.rescale(constants[0])
    scale = result.facts.get("target_scale")
    return clients if scale is None else rescale_target(clients, TargetScale.from_json(scale))


def train_newcomers(
    trained_server: TrainedServer, clients: Federation, config: Mapping[str, Any], rounds: int
) -> Result:
    """Evaluate newcomers on arrival, after rounds of their own, and after training alone for as many rounds.

    A newcomer first receives the server's model for newcomers, then it trains like any other client. The server uses
    its uploads for this newcomer alone: payloads of other clients never change.
    """
    fields = Settings.flat_fields()
    before = {k: v for k, v in config.items() if k in fields}
    changed = {
        **UNDISTURBED,
        "rounds": rounds,
        "eval_every": rounds,
        "early_stopping": "off",
        "client_state": "memory",
        # A schedule of the run's rounds has ended.
        **{name: fields[name].default for name in ("lr_schedule", "lr_warmup", "lr_step_size", "lr_gamma")},
        # The few clients that join are trained in this process.
        **({"engine": "auto", **RAY_DEFAULTS} if before.get("engine") == "ray" else {}),
    }
    settings = Settings.from_keywords(**{**before, **changed})
    config = {**config, "data": clients.name, **settings.to_keywords()}
    rule: ServerWrapper[Any] = ServerWrapper(trained_server.algorithm.server)
    state = load_server_rows(trained_server.state)
    method = replace(
        trained_server.algorithm,
        server=NewcomerServer(rule, state, trained_server.n_clients),
        bn_buffers="local",
        full_participation=False,
        notes=(),
    )
    start = {**rule.newcomer_model(state), **trained_server.statistics}
    loop = RoundLoop(method, clients, _copy_with_values(trained_server.trained_module, start), settings, config)
    loop.evaluate_arrival()
    joined = loop.run()
    alone = RoundLoop(local(), clients, copy.deepcopy(trained_server.module), settings, config)
    trained_alone = alone.run()
    arrival = next(
        score_clients(*scores, deviation=joined.target_deviation)
        for _, point, scores in loop.store.scores("test")
        if point == "received"
    )
    newcomers = [
        {
            "id": client.id,
            "n_train": client.n_train,
            "n_test": client.n_test,
            "received": float(first),
            "trained": client.trained,
            "local": by_itself.trained,
        }
        for client, by_itself, first in zip(joined.clients, trained_alone.clients, arrival, strict=True)
    ]
    return replace(joined, facts={**joined.facts, "newcomers": newcomers})


def _load_trained_server(
    result: Result,
    config: Mapping[str, Any],
    clients: Federation,
    algorithm: Algorithm | None,
    module: nn.Module | None,
) -> TrainedServer:
    if result.folder is None:
        raise RunError(
            "this run was not finished, or was kept neither in memory nor in a folder: no client can join it"
        )
    settings = result.settings.replace(device=config["device"])
    for given, name, key in ((algorithm, config.get(SOURCE_KEY, ""), "algorithm"), (module, config["model"], "module")):
        if given is None and is_reference(name):
            raise RunError(
                f"{result.folder} was trained with {make_portable(name)!r}, which is code of somebody's own and is not "
                f"run because a folder names it; if it is yours, give what it makes as `{key}`"
            )
    method, module = algorithm or build_algorithm(config), module or rebuild_model({**config, **result.facts})
    trained_module = build_trained_module(method, module, clients, settings.seed)
    # The newcomers are only an example of the data; there may be fewer of them than the run had attackers.
    context = make_run_context(method, clients, trained_module, settings, excluded=())
    folder, n = RunFolder(result.folder), result.n_clients
    state = init_server(context.algorithm, context.task, n, settings.seed)
    size = count_row_bytes(context.algorithm, context.task, state)
    state = RowStorage.choose(settings, n, size, folder.rows).allocate_server(state)
    tree = restore_tree(
        {"server": state, "clients": {"statistics": context.initial_statistics}},
        folder.checkpoints.load_latest().flat,
        rows=folder.rows,
    )
    return TrainedServer(
        context.algorithm, module, context.task.model, tree["server"], tree["clients"]["statistics"], n
    )


def _copy_with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
    return copied
