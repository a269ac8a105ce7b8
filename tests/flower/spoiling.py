"""Spoil what one node of a grid replies in one round."""

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Message

from fedattune.experiments.deploy.grid import pack_record, unpack_record
from fedattune.training.backends.message import WorkerMessage
from flower.in_process import InProcessGrid

Spoil = Callable[[WorkerMessage], WorkerMessage | None]


SPOILT, ROUND = 101, 2  # the node with clients 1, 2 and 4, in its second round


def spoiling(spoil: Callable[[Message], Message | None]) -> type[InProcessGrid]:
    """Make a grid that changes the reply of one node in one round on its way."""

    class Spoiling(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            kept = []
            for reply in super().pull_messages(message_ids):
                head = "" if reply.has_error() else str(reply.content["head"]["json"])
                mine = reply.metadata.src_node_id == SPOILT and '"kind": "trained"' in head
                if mine and f'"round": {ROUND}' in head:
                    reply = spoil(reply)
                if reply is not None:
                    kept.append(reply)
            return kept

    return Spoiling


def changed(change: Callable[[WorkerMessage], None]) -> Callable[[Message], Message]:
    """Change the content of a reply."""

    def spoil(reply: Message) -> Message:
        message = unpack_record(reply.content)
        change(message)
        reply.content = pack_record(message)
        return reply

    return spoil


def first(message: WorkerMessage) -> str:
    return next(name for name in message.tensors if name.startswith("upload/params/"))


def whole(new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[WorkerMessage], None]:
    """Change one tensor of the upload."""

    def change(message: WorkerMessage) -> None:
        message.tensors[first(message)] = new(message.tensors[first(message)])

    return change


def head(**values: Any) -> Callable[[WorkerMessage], None]:
    return lambda message: message.head.update(values)
