"""The server's side of the network: which nodes are online, and messages to and from them.

Parcels as Flower's records, and back: typed arrays and JSON, never pickle.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ...core.errors import RunError
from ...training.backends.message import FORMAT_VERSION, WorkerMessage
from .config import DeploymentOptions


class MessageFormatError(ValueError):
    """A record that is no parcel of this version."""


def pack_record(parcel: WorkerMessage) -> RecordDict:
    """The parcel as records: `arrays` (NumPy's own format, each with its type and shape) and `head` (JSON)."""
    arrays = {k: Array(v.detach().cpu().contiguous().numpy()) for k, v in parcel.tensors.items()}
    head = json.dumps(parcel.head | {"names": list(arrays)}, allow_nan=False)
    return RecordDict(
        {"arrays": ArrayRecord(arrays), "head": ConfigRecord({"version": FORMAT_VERSION, "json": head})}
    )


def unpack_record(record: RecordDict) -> WorkerMessage:
    """The parcel in a record.

    Raises:
        MessageFormatError: it holds none, or one of another version of the format.

    """
    try:
        head = record.config_records["head"]
        if (version := head["version"]) != FORMAT_VERSION:
            raise MessageFormatError(f"it speaks version {version!r:.40} of the format, not {FORMAT_VERSION}")
        content = json.loads(str(head["json"]))
        arrays = record.array_records["arrays"]
        # Flower's arrays cannot be written to, and PyTorch warns of such.
        tensors = {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in content.pop("names")}
    except MessageFormatError:
        raise
    except Exception as error:  # bytes from outside can fail in any way
        raise MessageFormatError(f"it is damaged ({type(error).__name__})") from error
    return WorkerMessage(content, tensors)


CLOCK_SKEW_S = 5
"""Seconds that a node's clock may be ahead of the server's."""


OFFLINE_CODE = 5
"""Flower's error code for a node that went away before it had answered."""


MESSAGE_TYPES = {"hello": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


class NodeReply(NamedTuple):
    """What came of a message to a node: a parcel, or why there is none, and the kind of the node's error."""

    parcel: WorkerMessage | None
    why: str = ""
    error: str = ""


class NodeGrid:
    """Messages to nodes, which Flower knows by numbers; `say` tells the user what happens."""

    def __init__(self, grid: Grid, deployment: DeploymentOptions, say: Callable[[str], None]) -> None:
        self._grid, self._deployment, self.say = grid, deployment, say

    def online(self) -> set[int]:
        """The nodes that are online now."""
        return set(self._grid.get_node_ids())

    def wait(self, enough: Callable[[set[int]], bool], what: str) -> set[int]:
        """Wait until enough nodes are online.

        Raises:
            RunError: they were not in time; `what` says what was waited for.

        """
        end = time.monotonic() + self._deployment.start_timeout
        said = -1
        while not enough(online := self.online()):
            if time.monotonic() > end:
                raise RunError(
                    f"{what}: got {len(online)} online after {self._deployment.start_timeout:g} seconds "
                    "(start-timeout); start the missing nodes (their logs say why they cannot connect), and run again: "
                    "a run goes on from its last round"
                )
            if len(online) != said:
                self.say(f"{what}: {len(online)} online")
                said = len(online)
            time.sleep(self._deployment.poll)
        return online

    def exchange(
        self, parcels: Mapping[int, WorkerMessage], group: str, timeout: float | None = None
    ) -> dict[int, NodeReply]:
        """Send parcels to nodes, and wait for the answers until the time is over, by default that of a round."""
        timeout = timeout or self._deployment.round_timeout
        end = time.monotonic() + timeout
        # A node that was away must not work off rounds that are over; Flower itself lets clocks differ by this much.
        ttl = timeout + CLOCK_SKEW_S
        messages = [
            Message(
                pack_record(p),
                message_type=MESSAGE_TYPES[p.head["kind"]],
                dst_node_id=node,
                group_id=group,
                ttl=ttl,
            )
            for node, p in parcels.items()
        ]
        # An answer names the message that it answers; who it says that it is from may be the SuperLink. What is too
        # large for the SuperLink has no number, and nothing has if all of it was.
        numbers = list(self._grid.push_messages(messages)) or [""] * len(messages)
        waiting = {message: node for message, node in zip(numbers, parcels, strict=True) if message}
        answers = {node: NodeReply(None, "could not be reached") for node in parcels}
        while waiting:
            late = time.monotonic() > end  # a look after the end, for the server may have slept itself
            for reply in list(self._grid.pull_messages(list(waiting))):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = _read(reply)
            if late:
                break
            if waiting:
                time.sleep(self._deployment.poll)
        return answers | dict.fromkeys(
            waiting.values(), NodeReply(None, f"gave no answer within {timeout:g} seconds")
        )


def _read(reply: Message) -> NodeReply:
    """A node's answer; its own words for an error may hold data, and are not repeated."""
    if reply.has_error() and reply.error.code == OFFLINE_CODE:
        return NodeReply(None, "went offline")
    if reply.has_error():
        return NodeReply(None, f"failed (Flower's error code {reply.error.code})")
    try:
        parcel = unpack_record(reply.content)
    except MessageFormatError as error:
        return NodeReply(None, f"sent what is no answer: {error}")
    if parcel.head.get("kind") == "failed":
        kind = re.sub(r"\W", "", str(parcel.head.get("error")))[:60]
        return NodeReply(None, f"failed ({kind}; its error.log says why)", kind)
    return NodeReply(parcel)
