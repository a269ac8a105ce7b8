"""The nodes of a Flower project: a mod that keeps personal layers, and training by any method in place of a loop."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..algorithms import ALGORITHMS
from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, ModelError, RunError, summarize_error
from ..core.io import flatten_tree
from ..core.options import build, look_up
from ..core.params import Params
from ..core.payload import Payload
from ..core.settings import LossOptions, Settings, SettingsKeywords, Training
from ..core.task import Task
from ..data import Client, ClientIndex, Federation, federation_from
from ..data.federated import renumber_clients, rescale_target
from ..data.sequences import find_sequences, pad_sequences
from ..data.types import TargetScale
from ..models import check_model
from ..models.inputs import suit_inputs, try_inputs
from ..training.backends.local import LocalBackend
from ..training.backends.message import WorkerMessage
from ..training.backends.worker import export_state, handle_message, load_state, open_backend
from ..training.clients.options import check_clients, check_method
from ..training.setup import build_trained_module
from .messages import KEY, Order, adapt, find_key, pack, pack_extras, read_order, unpack

OWN, STATE, MODEL, SETTINGS = ("fedattune-own", "fedattune-state", "fedattune-model", "fedattune-settings")
"""Keys in the context's state: the personal tensors of `mod`; the state, model and settings of `train`."""

HELD_OUT = 0.1
"""Share of the training samples that is held out for methods that choose by validation samples, as in `fit`."""

_LOCAL_GROUPS = (*Training.model_fields.items(), *LossOptions.model_fields.items())
LOCAL_SETTINGS = {info.alias or name for name, info in _LOCAL_GROUPS} - {"bn_affine", "bn_buffers"} | {
    "device", "dtype", "engine", "mixed_precision",
}  # fmt: skip
"""Settings of `train`; others concern the server or a simulation."""

RowsOf = Any
"""Samples of a node: a torch Dataset, a DataLoader, whose dataset is taken, or a pair (x, y) of arrays."""


def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Keep the personal tensors of a method on the node: `ClientApp(mods=[fedattune.flower.mod])`.

    The training and evaluation function see a whole model in the message. Its personal tensors are the node's own, in
    `context.state`, and they never leave the node. Without personal tensors, it does nothing.

    Args:
        message: a message of a FedAttune strategy.
        context: the node's context.
        call_next: the app, or the next mod.
    """
    if message.metadata.message_type not in (MessageType.TRAIN, MessageType.EVALUATE):
        return call_next(message, context)
    personal = read_order(message.content).personal
    if personal and OWN in context.state:
        message.content.array_records[find_key(message.content)].update(context.state.array_records[OWN])
    reply = call_next(message, context)
    is_training = message.metadata.message_type == MessageType.TRAIN
    if not personal or not is_training or reply.has_error() or KEY in reply.content.config_records:
        return reply
    arrays = reply.content.array_records[find_key(reply.content)]
    missing = sorted(set(personal) - arrays.keys())
    if missing:
        raise ConfigError(f"the reply lacks {missing[0]!r}; send the model's whole state_dict()")
    context.state[OWN] = ArrayRecord({name: arrays.pop(name) for name in personal})
    return reply


def train(
    message: Message,
    context: Context,
    model: nn.Module,
    data: RowsOf,
    *,
    validation: RowsOf = None,
    method: Algorithm | None = None,
    **settings: Unpack[SettingsKeywords],
) -> Message:
    """Train on a node by the method of the strategy, whatever its local steps are, and return the reply.

    Return it from the function under `@app.train()`. The loss is cross-entropy, or squared error for numbers.

    Args:
        message: the message that the function received.
        context: the node's context, whose state keeps what the method keeps on the node.
        model: the node's model; its values do not matter.
        data: training samples.
        validation: samples for methods that choose by them. By default, such methods hold out a tenth of `data`.
        method: the `Algorithm` of the strategy, if it is custom.
        settings: settings of local training: `lr`, `epochs` or `steps`, `batch_size`, `weight_decay` and so on.

    Raises:
        ConfigError: unknown settings, or a message of another strategy.
        DataError: the samples cannot be read.
        ModelError: the model does not fit the samples.
        RunError: the training diverged.
    """
    given = _check_settings(settings)
    node = _open(message, context, model, data, validation, method, given)
    wanted = node.backend.context.settings.execution.dtype
    types = {str(v.dtype).removeprefix("torch.") for v in node.received.params.values()}
    if wrong := sorted(types - {wanted}):
        raise ConfigError(
            f"dtype: the model of the strategy is {wrong[0]}, and the node trains in {wanted}; give the strategy a "
            f"model in {wanted}, or flower.train another dtype"
        )
    order, head = node.order, {"kind": "train", "replies_immediately": False, "should_evaluate": True, "resting": []}
    ids = {"ids": [order.number], "cohort": [order.number], "dropouts": []}
    request = WorkerMessage({**head, **ids, "round": order.round, "update_server": order.update_server})
    node.put_received(request)
    result = handle_message(node.backend, request)
    if not result.head["ids"]:
        raise RunError(
            f"training diverged in round {order.round} (values are not finite); lower the learning rate (lr is "
            f"{node.backend.context.settings.training.lr:g})"
        )
    context.state[STATE] = pack(flatten_tree(export_state(node.backend)))
    context.state[SETTINGS] = ConfigRecord({"json": json.dumps(given)})
    if node.is_judged_trained:
        context.state[MODEL] = pack(node.evaluated())
    upload, buffers = result.payload("upload").rows(0), result.get("buffers").rows(0)
    records: dict[str, Any] = {
        find_key(message.content): pack({**upload.params, **buffers}),
        "metrics": MetricRecord({order.count_key: node.n_train}),
        KEY: ConfigRecord({"round": order.round}),
    }
    return Message(RecordDict({**records, **pack_extras(upload)}), reply_to=message)


def personal_model(
    message: Message,
    context: Context,
    model: nn.Module,
    data: RowsOf,
    *,
    validation: RowsOf = None,
    method: Algorithm | None = None,
) -> nn.Module:
    """Return the model that a node predicts with, in evaluation mode, if it trains by `train`.

    Call it in the function under `@app.evaluate()`. It is the model that the method's paper scores. It is a copy of
    `model`, or the network that the method puts around it.

    Args:
        message: the message that the function received.
        context: the node's context.
        model: the node's model; its values do not matter.
        data: training samples, which some methods look at before they predict.
        validation: as for `train`.
        method: as for `train`.

    Raises:
        ConfigError: a message of another strategy.
    """
    stored = context.state.config_records.get(SETTINGS)
    given = json.loads(str(stored["json"])) if stored else {}
    node = _open(message, context, model, data, validation, method, given)
    if node.is_judged_trained and MODEL in context.state:
        state: Mapping[str, Tensor] = context.state.array_records[MODEL].to_torch_state_dict()
    else:
        head = {"kind": "evaluate", "round": node.order.round, "has_w": False, "has_mean": False}
        request = WorkerMessage({**head, "replies_immediately": False})
        node.put_received(request)
        handle_message(node.backend, request)
        state = node.evaluated()
    filled = copy.deepcopy(node.backend.context.task.model)
    filled.load_state_dict({**filled.state_dict(), **state}, strict=False)
    return filled.eval()


@dataclass(frozen=True)
class _Node:
    """A node that is ready to handle a message.

    Attributes:
        order: the strategy's instructions.
        backend: the one client, with the state that it had after its last training.
        received: the shared tensors of the model that arrived, and the extras.
        statistics: the averaged statistics that arrived; empty if they stay local.
        n_train: training samples.
    """

    order: Order
    backend: LocalBackend
    received: Payload
    statistics: Params
    n_train: int

    @property
    def is_judged_trained(self) -> bool:
        """True if the model after local training is the one to evaluate."""
        algorithm = self.backend.context.algorithm
        return algorithm.evaluation_point == "trained" and not algorithm.fine_tune

    def put_received(self, request: WorkerMessage) -> None:
        """Put the received model and the averaged statistics into a request to the backend."""
        request.put("sent", self.received.map(lambda part: part.repeat(1)))
        request.put("statistics", self.statistics)

    def evaluated(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that the backend evaluated last."""
        models, buffers = self.backend.evaluated_models
        return {**models.rows(0), **buffers.rows(0)}


def _open(
    message: Message,
    context: Context,
    model: nn.Module,
    data: RowsOf,
    validation: RowsOf,
    method: Algorithm | None,
    given: Mapping[str, Any],
) -> _Node:
    order = read_order(message.content)
    algorithm = adapt(_find_algorithm(order, method), order.bn_buffers)
    settings = Settings.from_keywords(
        **{
            **given,
            "rounds": max(order.rounds, order.round),
            "seed": order.seed,
            "cohort": min(order.cohort, order.n_nodes),
            "bn_buffers": order.bn_buffers,
            "eval_clients": order.n_nodes,
            "early_stopping": "off",
            "client_state": "memory",
        }
    )
    probe = algorithm.client.plan.probe
    held_out = HELD_OUT if probe and probe.rows == "validation" else 0.0
    federation = suit_inputs(_read_data(model, data, validation, held_out, [order.seed, order.number]), model)
    saved = context.state.array_records.get(STATE)
    if saved is None:
        check_clients(settings, federation)
        check_model(model, federation, batch_size=settings.training.batch_size, engine=settings.execution.engine)
    n_train = int(federation.sizes("train")[0])
    tensors = Params(message.content.array_records[find_key(message.content)].to_torch_state_dict())
    module = build_trained_module(algorithm, copy.deepcopy(model).cpu(), federation, order.seed)
    if saved is None:
        check_method(algorithm, module, settings, federation)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(
            f"the model {type(model).__name__} of the node is not the one of the strategy: {summarize_error(error)}"
        ) from error
    client = renumber_clients(federation, np.array([order.number]), order.n_nodes)
    backend = open_backend(algorithm, client, module, settings, [order.number], is_one_message=True)
    if saved is not None:
        state = Params(saved.to_torch_state_dict())
        load_state(backend, state.map(lambda v: v.to(backend.client_ids.device)))
    shared = tensors.only(backend.context.task.params).without(backend.client_states.personal)
    return _Node(order, backend, unpack(message.content, shared), tensors.only(backend.statistics), n_train)


def _find_algorithm(order: Order, method: Algorithm | None) -> Algorithm:
    """Return the method; a name in a message never refers to code of the sender."""
    if method is not None:
        return method
    if order.method not in ALGORITHMS:
        raise ConfigError("the strategy has a custom method; give it to the node, too: method=Algorithm(...)")
    return build(order.method, look_up("algorithm", order.method, ALGORITHMS), order.options)


def _check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    wrong = sorted(settings.keys() & Settings.flat_fields().keys() - LOCAL_SETTINGS)
    if wrong:
        raise ConfigError(
            f"fedattune.flower.train: {wrong[0]} is no setting of local training; the strategy, or Flower itself, "
            "decides about it"
        )
    return dict(settings)


def _read_data(model: nn.Module, data: RowsOf, validation: RowsOf, held_out: float, stream: list[int]) -> Federation:
    """Return a federation of one client, whose samples are for training or validation, numbers in their unit."""
    train, *more = (part.dataset if isinstance(part, DataLoader) else part for part in (data, validation))
    has_validation = more[0] is not None
    client = {"train": train, "test": more[0]} if has_validation else train
    federation = federation_from({"node": client}, classes=_list_classes(model, train), validation=0.0, min_clients=1)
    rows = np.arange(len(federation.y))
    n_train = int(federation.sizes("train")[0]) if has_validation else len(rows) - int(held_out * len(rows))
    if not has_validation and n_train < len(rows):
        rows = np.random.default_rng(stream).permutation(rows)
    one = Client("node", rows[:n_train], rows[n_train:], rows[:0])
    if (scale := federation.target_scale) is not None:
        federation = rescale_target(federation, _make_unit(scale))
    return replace(federation, clients=ClientIndex.from_clients([one]))


def _make_unit(like: TargetScale) -> TargetScale:
    """Return the scale in which a target, or each of several, is as it was given."""
    if isinstance(like.mean, tuple):
        return TargetScale((0.0,) * len(like.mean), (1.0,) * len(like.mean))
    return TargetScale(0.0, 1.0)


def _list_classes(model: nn.Module, data: RowsOf) -> list[str] | None:
    """Number the classes by the model's outputs, as a node need not have samples of all.

    Return None for other targets than whole numbers, and for samples of other kinds, which are read elsewhere.
    """
    try:
        if isinstance(data, (tuple, list)):
            is_unequal = find_sequences("x", data[0]) is not None
            pair = [pad_sequences(data[0][:1]) if is_unequal else data[0][:1], data[1][:1]]
        else:
            pair = [np.asarray(v)[None] for v in data[0]]
        x, y = map(torch.as_tensor, pair)
    except Exception:  # what cannot be read is refused later, with the reason
        return None
    y = y[:, 0] if y.shape[1:] == (1,) else y
    if y.is_floating_point():
        return None
    task = Task(copy.deepcopy(model).cpu())
    # Whole numbers stay so where the model takes them.
    if (found := try_inputs(task, (x, x.to(next(iter(task.params.values()), x))))) is None:
        return None
    # Labels and numbers have an output each, classes have an axis more than their targets.
    n = found[1].shape[1] if found[1].dim() == y.dim() + 1 else 0
    return [str(k) for k in range(n)] if n > 1 else None
