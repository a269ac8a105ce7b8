"""Spoil what one node of a grid replies in some rounds."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import Message

from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.training.backends.message import WorkerMessage, join_messages, split_message
from flower.in_process import InProcessGrid

Spoil = Callable[[Message], Message | None]

SPOILT = 101
"""The node with clients 1, 2 and 4."""


def spoiling(spoils: Mapping[int, Spoil]) -> type[InProcessGrid]:
    """Make a grid that changes the replies of one node to some rounds of training on their way."""

    class Spoiling(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            kept = []
            for reply in super().pull_messages(message_ids):
                head = {} if reply.has_error() else json.loads(str(reply.content["head"]["json"]))
                last = head.get("parts", [head])[-1]
                mine = reply.metadata.src_node_id == SPOILT and last.get("kind") == "trained"
                if mine and last["round"] in spoils:
                    reply = spoils[last["round"]](reply)
                if reply is not None:
                    kept.append(reply)
            return kept

    return Spoiling


def changed(change: Callable[[WorkerMessage], None]) -> Callable[[Message], Message]:
    """Change the content of a reply to a training, which may come after the reply to an evaluation."""

    def spoil(reply: Message) -> Message:
        message = unpack_record(reply.content)
        parts = split_message(message)
        change(parts[-1])
        if len(parts) > 1:
            joined = join_messages(parts)
            token = {"token": parts[-1].head.get("token", message.head["token"])}
            message = WorkerMessage(message.head | {"parts": joined.head["parts"]} | token, joined.tensors)
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
