"""The server of a Flower project: a strategy whose state and arithmetic are those of a method's server rule."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log
from torch import Tensor, nn

from ..algorithms import ALGORITHMS
from ..algorithms.own import build_method
from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, RunError, did_you_mean, summarize_error
from ..core.hardware import seed_rng
from ..core.params import Params, concatenate
from ..core.payload import Payload, ServerState, concatenate_payloads
from ..core.task import Task
from ..deploy.server.reply_checks import fill_personal, make_stepless_upload
from ..models.files import wrap_model
from ..models.inputs import try_inputs
from ..runs.rows import RowStorage
from ..server.average import client_weights, weighted_sum
from ..server.wrapper import ServerWrapper
from ..training.backends.message import flatten_payload, unflatten_payload
from ..training.setup import get_shared_parameters, init_server
from .messages import (
    EXTRA,
    KEY,
    Order,
    Statistics,
    adapt,
    find_key,
    find_personal,
    is_plain,
    pack,
    pack_extras,
    pack_whole,
)

MAX_SAMPLES = 2**40
"""Largest number of training samples of a node."""


class _Upload(NamedTuple):
    """A node's reply: its upload (1, ...), its buffers, its training samples, and whether `train` made it."""

    payload: Payload
    buffers: Params
    n: int
    is_ours: bool


class MethodStrategy(FedAvg):
    """A Flower strategy that sends each node a model of its own; make it by `strategy`.

    Nodes are numbered in the order of their ids when they first appear. A node that errs or leaves keeps its state at
    the server; a node that appears later joins as a newcomer.
    """

    def __init__(
        self,
        name: str,
        algorithm: Algorithm,
        options: Mapping[str, Any],
        model: nn.Module,
        *,
        bn_buffers: Statistics,
        seed: int,
        input_shape: Sequence[int] | None,
        **flower: Any,
    ) -> None:
        """Check the arguments, which are those of `strategy`."""
        try:
            super().__init__(**flower)
        except TypeError as error:
            raise ConfigError(
                f"strategy: {error}; beside its own arguments it takes those of Flower's FedAvg"
            ) from error
        if algorithm.full_participation and self.fraction_train < 1:
            raise ConfigError(
                f"{name} needs all nodes in each round, got fraction_train={self.fraction_train:g}; use 1"
            )
        if algorithm.network and input_shape is None:
            raise ConfigError(
                f"{name} puts a network of its own around the model, which needs the shape of one sample; give "
                "input_shape=(3, 32, 32), say"
            )
        self.name, self._options, self._bn_buffers, self._seed = name, dict(options), bn_buffers, seed
        self._algorithm = adapt(algorithm, bn_buffers)
        self._rule: ServerWrapper[Any] = ServerWrapper(self._algorithm.server)
        self._model, self._input_shape = model, input_shape
        self._rounds = 0
        self._numbers: dict[int, int] = {}
        self._state: ServerState = {}
        self._sent: dict[int, Payload] = {}
        self._uploaded: dict[int, Params] = {}
        self._known: list[ArrayRecord] = []  # the initial model, and the one that was aggregated last

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **others: Any) -> Result:
        """Run all rounds, and let the nodes know their number, which schedules of the learning rate need.

        Args:
            grid: the connection to the nodes.
            initial_arrays: the initial model: `ArrayRecord(model.state_dict())`.
            num_rounds: number of rounds.
            more: further arguments of Flower's `Strategy.start`.
            others: the same by keyword, such as `train_config`.

        Raises:
            ConfigError: the initial model is not that of the strategy, or nodes cannot do what the method needs.
            RunError: no reply of a round fits.
        """
        self._rounds = num_rounds
        return super().start(grid, initial_arrays, num_rounds, *more, **others)

    def summary(self) -> None:
        """Log the method, and the configuration that Flower's FedAvg logs."""
        log(INFO, "\t├──> Method: %s %s", self.name, self._options or "")
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as Flower's FedAvg does, and send each of them its own model.

        Args:
            server_round: number of the round, from 1. Round 1 starts anew from `arrays`.
            arrays: the initial model, in round 1; later rounds start from the state of the method.
            config: the user's config, which travels with each message.
            grid: the connection to the nodes.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        if server_round == 1 or not self._numbers:
            self._start(arrays)
        self._check_unchanged(arrays)
        nodes = [message.metadata.dst_node_id for message in messages]
        online = {*nodes, *grid.get_node_ids()}
        if self._algorithm.full_participation and len(nodes) < len(online):
            raise ConfigError(f"{self.name} needs all nodes in each round, got {len(nodes)} of {len(online)}")
        self._add_nodes(online)
        self._sent = self._broadcast(nodes)
        return [self._replace_content(message, server_round, self._sent, len(nodes)) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the uploads by the method's rule; a reply that does not fit is left out, with a warning.

        Args:
            server_round: number of the round, from 1.
            replies: the nodes' replies to `configure_train`.

        Returns:
            One model for all, for a central evaluation: the global model, or the one that a newcomer would receive. And
            the mean metrics of the nodes.

        Raises:
            ConfigError: the nodes cannot do what the method needs.
            RunError: no reply fits; the message has the first reason.
        """
        uploads, contents, problems = dict[int, _Upload](), list[RecordDict](), list[str]()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                log(WARNING, "round %d: node %d failed: %s", server_round, node, reply.error.reason)
                continue
            try:
                uploads[node] = self._read(node, reply.content)
                contents.append(reply.content)
            except ConfigError:
                raise
            except Exception as error:  # data from outside can fail in any way
                why = error if isinstance(error, RunError) else f"sent no valid reply ({summarize_error(error)})"
                problems.append(f"node {node} {why}")
                log(WARNING, "round %d: %s; its reply is left out", server_round, problems[-1])
        if problems and not uploads:
            raise RunError(f"round {server_round}: no reply fits: {problems[0]}")
        if not uploads:
            if not is_plain(self._algorithm):
                log(WARNING, "round %d: no node replied; %s", server_round, self._explain_train())
            self._state = self._rule.skip_round(self._state)
            return None, None
        self._aggregate(uploads)
        model = self._fill(self._rule.newcomer_model(self._state))
        self._known[1:] = [model]
        return model, self._average_metrics(server_round, contents)

    def _average_metrics(self, r: int, contents: list[RecordDict]) -> MetricRecord | None:
        try:
            return self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # nodes choose their metrics, and these need not fit each other
            log(WARNING, "round %d: the metrics of the replies have no mean (%s)", r, summarize_error(error))
            return None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as Flower's FedAvg does, and send each of them the model to evaluate.

        It is the model that the method's paper scores: what the node receives now, or what the node trained last. A
        node that trains by `fedattune.flower.train` is sent what it receives; its `personal_model` knows the rest.
        The arguments are those of `configure_train`.
        """
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        if not messages:
            return []
        if not self._numbers:
            self._start(arrays)
        self._check_unchanged(arrays)
        nodes = [message.metadata.dst_node_id for message in messages]
        self._add_nodes({*nodes, *grid.get_node_ids()})
        sent = self._broadcast(nodes)
        if self._algorithm.evaluation_point == "trained":
            sent |= {node: sent[node]._replace(params=w) for node, w in self._uploaded.items() if node in sent}
        return [self._replace_content(message, server_round, sent, len(nodes)) for message in messages]

    def personal_arrays(self) -> dict[int, ArrayRecord]:
        """Return the model that each node would be sent for training now, by node id; nothing before round 1.

        Personal tensors have their initial values, as their own values stay on the nodes.
        """
        return {node: self._fill(sent.params.rows(0)) for node, sent in self._broadcast(list(self._numbers)).items()}

    def _start(self, arrays: ArrayRecord) -> None:
        """Take over the initial model, and forget everything else."""
        module = copy.deepcopy(self._model).cpu()
        state = arrays.to_torch_state_dict()
        expected = module.state_dict()
        wrong = sorted(state.keys() ^ expected.keys()) or [k for k, v in expected.items() if state[k].shape != v.shape]
        if wrong:
            raise ConfigError(
                f"initial_arrays: {wrong[0]!r} is not alike there and in the model {type(module).__name__} of the "
                "strategy; write initial_arrays=ArrayRecord(model.state_dict())"
            )
        module.load_state_dict(state)
        if network := self._algorithm.network:
            assert self._input_shape is not None
            module = wrap_model(network, module, _make_example(module, self._input_shape), self._seed)
        self._task, self._initial = Task(module), dict(module.state_dict())
        names = {id(p): name for name, p in module.named_parameters()}
        self._tied = {k: names[id(p)] for k, p in module.named_parameters(remove_duplicate=False)}
        self._personal = find_personal(self._algorithm, module)
        self._shared = get_shared_parameters(self._algorithm, self._task)
        kept = {*self._personal, *self._task.params}
        self._buffers = Params({k: v for k, v in module.named_buffers() if k in self._initial and k not in kept})
        self._numbers, self._state, self._uploaded = {}, {}, {}
        self._known = [arrays]

    def _check_unchanged(self, arrays: ArrayRecord) -> None:
        """Check that nobody changed the model between rounds: nodes are sent models of the method's own state."""
        if arrays not in self._known:
            raise ConfigError(
                f"{self.name}: the model was changed after its aggregation, as Flower's wrappers for differential "
                "privacy add noise to it, but nodes are sent models of the method's own state, without the change; "
                "leave the wrapper out, or wrap a strategy of Flower"
            )

    def _add_nodes(self, nodes: Iterable[int]) -> None:
        new, n = sorted(set(nodes) - self._numbers.keys()), len(self._numbers)
        if not new:
            return
        if n:
            with seed_rng(self._seed + n):
                self._state = self._rule.add_clients(self._state, len(new))
        else:
            lazy = init_server(self._algorithm, self._task, len(new), self._seed)
            self._state = RowStorage(len(new)).allocate_server(lazy)
        self._numbers |= {node: n + i for i, node in enumerate(new)}

    def _broadcast(self, nodes: Sequence[int]) -> dict[int, Payload]:
        """Return the payload (1, ...) for each node."""
        if not nodes:
            return {}
        ordered = sorted(nodes, key=self._numbers.__getitem__)
        payload = self._rule.broadcast(self._state, torch.tensor([self._numbers[node] for node in ordered])).payload
        return {node: payload.rows(slice(i, i + 1)) for i, node in enumerate(ordered)}

    def _replace_content(self, message: Message, r: int, sent: Mapping[int, Payload], cohort: int) -> Message:
        """Return the message with the node's own model, and the order in its config."""
        node = message.metadata.dst_node_id
        payload = sent[node].rows(0)
        order = Order(
            self.name,
            self._options,
            self._bn_buffers,
            self._seed,
            self._numbers[node],
            len(self._numbers),
            cohort,
            r,
            self._rounds,
            self._personal,
            self._rule.traits.should_update,
            self.weighted_by_key,
        )
        config = order.to_config(message.content.config_records[self.configrecord_key])
        # Nodes need a model to begin with, also from a rule whose payload is none.
        is_model = self._rule.traits.sends_models
        arrays = self._fill(payload.params if is_model else self._shared)
        extras = pack_extras(payload) if is_model else pack_whole(payload)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config, **extras})
        return Message(content, message_type=message.metadata.message_type, dst_node_id=node)

    def _fill(self, w: Params) -> ArrayRecord:
        """Return the whole model of a node, as its `load_state_dict` expects it."""
        known = {**self._buffers, **w}
        return pack({k: known.get(self._tied.get(k, k), v) for k, v in self._initial.items()})

    def _read(self, node: int, content: RecordDict) -> _Upload:
        """Read a node's reply, or raise RunError, which continues "node 7 ..."."""
        is_ours = KEY in content.config_records
        if not is_ours and not is_plain(self._algorithm):
            raise ConfigError(self._explain_train())
        try:
            state = Params(content.array_records[find_key(content)].to_torch_state_dict())
        except ConfigError as error:
            raise RunError(str(error)) from error
        if mine := sorted(state.keys() & set(self._personal)):
            raise ConfigError(
                f"{self.name} keeps {mine[0]!r} on the nodes, and node {node} sent it; write "
                "ClientApp(mods=[fedattune.flower.mod])"
            )
        for name, like in self._shared.items():
            _check_tensor(name, state.get(name), like)
        known = {k: v for k, v in self._buffers.items() if k in state}
        buffers = state.only(k for k, v in known.items() if (state[k].shape, state[k].dtype) == (v.shape, v.dtype))
        for name, value in buffers.items():
            _check_finite(name, value, self._buffers[name].isfinite())
        n = _read_count(content, self.weighted_by_key)
        payload = Payload(state.only(self._shared), self._read_extras(node, content))
        return _Upload(payload.map(lambda part: part.map(lambda v: v[None])), buffers, n, is_ours)

    def _read_extras(self, node: int, content: RecordDict) -> dict[str, Params]:
        """Read what came beside the model; it has the names and shapes of a node's that does no local step."""
        w = self._task.params
        personal = w.only(self._algorithm.personal.names(self._task.model))
        sent = fill_personal(self._sent[node].rows(0), w, personal)
        example = make_stepless_upload(self._algorithm.client, sent, w, personal)
        expected = flatten_payload(example._replace(params=Params()))
        record = content.array_records.get(EXTRA)
        found = record.to_torch_state_dict() if record else {}
        if odd := sorted(found.keys() - expected.keys()):
            raise RunError(
                f"sent {odd[0]!r:.80} beside its model, expected {', '.join(expected) or 'nothing'}; return "
                "the reply of fedattune.flower.train as it is"
            )
        for name, like in expected.items():
            _check_tensor(name, found.get(name), like)
        return unflatten_payload({name: found[name] for name in expected}).extra

    def _explain_train(self) -> str:
        return (
            f"{self.name} changes the local training, which a custom training function cannot know: let "
            "@app.train() return fedattune.flower.train(msg, context, model, data, ...), or take a method whose "
            f"clients train as usual: {', '.join(list_plain_methods())}"
        )

    def _aggregate(self, uploads: Mapping[int, _Upload]) -> None:
        nodes = sorted(uploads, key=self._numbers.__getitem__)
        ordered = [uploads[node] for node in nodes]
        ids = torch.tensor([self._numbers[node] for node in nodes])
        n = torch.tensor([upload.n for upload in ordered])
        sent = concatenate_payloads([self._sent[node] for node in nodes])
        payload = concatenate_payloads([upload.payload for upload in ordered])
        self._state = self._rule.aggregate(self._state, ids, sent, payload, n)
        for node, upload in uploads.items():
            if upload.is_ours:
                self._uploaded.pop(node, None)
            elif self._algorithm.evaluation_point == "trained":
                self._uploaded[node] = upload.payload.params
        for name, old in self._buffers.items():
            rows = [(upload.buffers.only([name]), upload.n) for upload in ordered if name in upload.buffers]
            if rows:
                self._buffers[name] = _merge_buffer(name, old, rows)


def _make_example(module: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return two samples of zeros, of the type that a model takes."""
    task = Task(module)
    types = (next(iter(task.params.values())).dtype, torch.int64)
    if found := try_inputs(task, (torch.zeros(2, *shape, dtype=dtype) for dtype in types)):
        return found[0]
    raise ConfigError(
        f"input_shape: the model {type(module).__name__} does not take samples of the shape {tuple(shape)}; give the "
        "shape of one sample, without the batch"
    )


def _merge_buffer(name: str, old: Tensor, rows: Sequence[tuple[Params, int]]) -> Tensor:
    """Return the mean of a buffer by training samples, or the largest value of a counter."""
    stack = concatenate([row.map(lambda v: v[None]) for row, _ in rows])
    if not old.is_floating_point():
        return stack[name].amax(0)
    return weighted_sum(client_weights(torch.tensor([n for _, n in rows]), "samples"), stack)[name].to(old.dtype)


def _check_tensor(name: str, value: Tensor | None, like: Tensor) -> None:
    """Check a tensor of a reply against the strategy's model."""
    if value is None or value.shape != like.shape:
        found = "no such array" if value is None else f"one of shape {tuple(value.shape)}"
        raise RunError(
            f"sent {found}: {name!r}, expected shape {tuple(like.shape)}; all nodes and the strategy need one model, "
            "and replies its whole state_dict()"
        )
    if value.dtype != like.dtype:
        raise RunError(
            f"sent {name!r} as {value.dtype}, expected {like.dtype}; send the model's own floating-point type"
        )
    _check_finite(name, value, torch.tensor(True))


def _check_finite(name: str, value: Tensor, where: Tensor) -> None:
    """Check values where they should be finite, unlike those of a mask that is a buffer."""
    if not (value.isfinite() | ~where).all():
        raise RunError(
            f"sent values that are not finite in {name!r}; its training diverged, so lower the learning rate"
        )


def _read_count(content: RecordDict, key: str) -> int:
    """Return the number of training samples in a reply."""
    found = [metrics[key] for metrics in content.metric_records.values() if key in metrics]
    if len(found) != 1 or isinstance(found[0], list) or not 1 <= found[0] <= MAX_SAMPLES:
        raise RunError(
            f"sent {found[0] if found else 'no'} {key}, expected its number of training samples, from 1 to 2^40; write "
            f"MetricRecord({{{key!r}: len(trainloader.dataset)}})"
        )
    return round(found[0])


def list_plain_methods() -> list[str]:
    """List the methods that need no training function but the user's, with their default options."""
    return [name for name, factory in ALGORITHMS.items() if name != "local" and is_plain(factory())]


def strategy(
    method: str | Algorithm,
    model: nn.Module,
    *,
    options: Mapping[str, Any] | None = None,
    bn_buffers: Statistics = "average",
    seed: int = 0,
    input_shape: Sequence[int] | None = None,
    **flower: Any,
) -> MethodStrategy:
    """Make a Flower strategy that trains by a method of FedAttune.

    Args:
        method: name of a method, or an `Algorithm`.
        model: the model that the nodes train; `initial_arrays` have its values.
        options: options of a method that is given by name.
        bn_buffers: `average` the statistics of BatchNorm layers over nodes, or leave them `local`.
        seed: seed of what the method draws.
        input_shape: shape of one sample, for methods that put a network of their own around the model.
        flower: arguments of Flower's `FedAvg`, such as `fraction_train` and `min_available_nodes`.

    Raises:
        ConfigError: unknown names, or options that do not go together.

    Examples:
        >>> from torch import nn
        >>> strategy("fedmcsa", nn.Linear(64, 10), options={"sigma": 20.0}, fraction_train=0.5).name
        'fedmcsa'
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f'strategy: got {type(model).__name__} as the model; write strategy("fedavg", Net())')
    if bn_buffers not in ("average", "local"):
        raise ConfigError(f"bn_buffers: got {bn_buffers!r}; {did_you_mean(str(bn_buffers), ('average', 'local'))}")
    algorithm = build_method(method, options or {}) if isinstance(method, str) else method
    name = method if isinstance(method, str) and method in ALGORITHMS else "custom"
    return MethodStrategy(
        name, algorithm, options or {}, model, bn_buffers=bn_buffers, seed=seed, input_shape=input_shape, **flower
    )
