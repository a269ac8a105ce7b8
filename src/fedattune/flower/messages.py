"""The contents of messages beside models: a JSON text in the config, and the extras of payloads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from ..client import SGD
from ..core.algorithm import Algorithm, Participation
from ..core.errors import ConfigError
from ..core.params import Params
from ..core.payload import Payload
from ..training.backends.message import flatten_payload, unflatten_payload

KEY = "fedattune"
"""Key of the JSON text in the config of a message, and of the record that marks replies of `train`."""

EXTRA = "fedattune-extra"
"""Key of the record with the extras of a payload."""

Statistics = Literal["average", "local"]


@dataclass(frozen=True)
class Order:
    """The strategy's instructions to a node, which travel in the config of each message.

    Attributes:
        method: name of the method, or `custom`.
        options: options of the method.
        bn_buffers: whether the statistics of BatchNorm layers are averaged.
        seed: seed of the run.
        number: the node's number among all nodes, from 0.
        n_nodes: number of all nodes so far.
        cohort: nodes that train in this round.
        round: number of the round, from 1.
        rounds: rounds of the run, as far as the strategy knows.
        personal: names of the tensors that stay on the node.
        update_server: whether uploads change what the server sends to others.
        count_key: key of the number of training samples in the metrics of a reply.
    """

    method: str
    options: dict[str, Any]
    bn_buffers: Statistics
    seed: int
    number: int
    n_nodes: int
    cohort: int
    round: int
    rounds: int
    personal: list[str]
    update_server: bool
    count_key: str

    def to_config(self, config: ConfigRecord) -> ConfigRecord:
        """Return the user's config with the order; one record, as Flower's own mods expect."""
        return ConfigRecord({**config, KEY: json.dumps(asdict(self))})


def read_order(content: RecordDict) -> Order:
    """Read the order in a message."""
    for config in content.config_records.values():
        if KEY in config:
            return Order(**json.loads(str(config[KEY])))
    raise ConfigError(
        "the message is not from a strategy of FedAttune; write fedattune.flower.strategy(...) in the ServerApp"
    )


def adapt(algorithm: Algorithm, bn_buffers: Statistics) -> Algorithm:
    """Return the method for Flower's rounds: the sampled nodes are sent models, train, and upload."""
    return replace(algorithm, participation=Participation(), bn_buffers=algorithm.bn_buffers or bn_buffers)


def is_plain(algorithm: Algorithm) -> bool:
    """Tell whether a training function that knows nothing of the method does the clients' part of it."""
    rule = algorithm.client
    is_sgd = type(rule) is SGD and rule == SGD(start=rule.start) and rule.start != "own"
    return is_sgd and not algorithm.network and not algorithm.fine_tune


def find_personal(algorithm: Algorithm, module: nn.Module) -> list[str]:
    """Return the names of the tensors that stay on a node: personal parameters, and buffers if they are local."""
    buffers = [name for name, _ in module.named_buffers()] if algorithm.bn_buffers == "local" else []
    return [*algorithm.personal.names(module), *buffers]


def pack_extras(payload: Payload) -> dict[str, ArrayRecord]:
    """Return the record with the extras of one payload; nothing if there are none."""
    return pack_whole(payload._replace(params=Params())) if payload.extra else {}


def pack_whole(payload: Payload) -> dict[str, ArrayRecord]:
    """Return the record with extras and tensors of a payload that is no model, so that both do not travel as one."""
    return {EXTRA: pack(flatten_payload(payload))}


def unpack(content: RecordDict, shared: Params) -> Payload:
    """Return the payload in a message whose model has the tensors `shared`."""
    record = content.array_records.get(EXTRA)
    payload = unflatten_payload(record.to_torch_state_dict()) if record else Payload(Params(), {})
    return payload if payload.params else payload._replace(params=shared)


def pack(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of tensors."""
    return ArrayRecord(torch_state_dict=dict(tensors)) if tensors else ArrayRecord()


def find_key(content: RecordDict) -> str:
    """Return the key of the one record of model tensors in a message."""
    keys = [key for key in content.array_records if key != EXTRA]
    if len(keys) != 1:
        raise ConfigError(
            f"got the ArrayRecords {sorted(keys)}, expected one: RecordDict({{'arrays': ArrayRecord(...), ...}})"
        )
    return keys[0]
