"""Messages between the server and its nodes: Flower's records, which hold typed arrays and JSON, never pickle."""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from safetensors.torch import load, save
from torch import Tensor

from ..core.errors import RunError
from ..core.faults import Fault
from ..training.backends.message import FORMAT_VERSION, WorkerMessage
from .config import DeploymentOptions
from .node.files import LostStateError

CLOCK_SKEW_S = 5
"""Seconds by which a node's clock may be ahead of the server's."""

ONLINE_EVERY_S = 5.0
"""Seconds between two looks at the nodes that are online, while the server waits for replies."""

CALLS = 3
"""Calls of Flower's grid before an error ends the run; few, as Flower itself waits for a SuperLink that is away."""

OFFLINE_CODE = 5
"""Flower's error code for a node that went offline before it replied."""

MESSAGE_TYPES = {"hello": MessageType.QUERY, "evaluate": MessageType.EVALUATE}
"""Kind of a message -> Flower's type; all others are trainings."""


T = TypeVar("T")


class MessageFormatError(ValueError):
    """A record is no message of this version of the format."""


def pack_record(message: WorkerMessage) -> RecordDict:
    """Pack a message into records: `arrays` (all tensors as one array) and `head` (JSON).

    Every object of a message costs the SuperLink several requests. So all tensors are one array, the bytes of a
    safetensors file.
    """
    whole, copies = _drop_copies(message.tensors)
    head = message.head | {"names": list(message.tensors), "copies": copies}
    arrays = {"tensors": Array(np.frombuffer(save(whole), dtype=np.uint8))} if whole else {}
    config = ConfigRecord({"version": FORMAT_VERSION, "json": json.dumps(head, allow_nan=False)})
    return RecordDict({"arrays": ArrayRecord(arrays), "head": config})


def _drop_copies(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split tensors into different ones, and the names of the others with the name of an equal tensor."""
    whole, copies, seen = dict[str, Tensor](), dict[str, str](), dict[tuple[Any, ...], str]()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        content = hashlib.sha256(dense.reshape(-1).view(torch.uint8).numpy().data).digest() if dense.numel() else b""
        first = seen.setdefault((dense.dtype, dense.shape, content), name)
        if first == name:
            whole[name] = dense
        else:
            copies[name] = first
    return whole, copies


def unpack_record(record: RecordDict) -> WorkerMessage:
    """Unpack the message in a record, or raise `MessageFormatError`."""
    try:
        head = record.config_records["head"]
        if (version := head["version"]) != FORMAT_VERSION:
            raise MessageFormatError(
                f"its message has version {version!r:.40} of the format, expected {FORMAT_VERSION}; install the same "
                "version of FedAttune at the server and at the nodes"
            )
        content = json.loads(str(head["json"]))
        arrays, names, copies = record.array_records["arrays"], content.pop("names"), content.pop("copies")
        whole = load(arrays["tensors"].numpy().tobytes()) if "tensors" in arrays else {}
        tensors = {name: whole[copies.get(name, name)] for name in names}
    except MessageFormatError:
        raise
    except Exception as error:  # bytes from outside can fail in any way
        raise MessageFormatError(f"its message is damaged ({type(error).__name__})") from error
    return WorkerMessage(content, tensors)


class NodeGrid:
    """The server's connection to its nodes, which Flower numbers."""

    def __init__(
        self,
        grid: Grid,
        options: DeploymentOptions,
        log: Callable[[str], None],
        watch: Callable[[set[int]], None] = lambda _: None,
        list_removed: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self._grid, self._options, self.log, self._watch = grid, options, log, watch
        self._list_removed, self._removed, self._asked = list_removed, frozenset[int](), -math.inf
        self._looked = 0.0
        self._online, self._left = set[int](), set[int]()

    def online(self) -> set[int]:
        """Return the numbers of the nodes that are online, and let the observer know them."""
        numbers = set(self._call(self._grid.get_node_ids))
        self._watch(numbers)
        self._looked = time.monotonic()
        self._left |= self._online - numbers
        self._online = numbers
        return numbers

    def take_left(self) -> set[int]:
        """Return the numbers that went offline since the last call, those that are back too."""
        left, self._left = self._left, set()
        return left

    def is_removed(self, number: int) -> bool:
        """Tell whether a node's key was removed, as far as the SuperLink says; it is asked every few seconds only."""
        if number not in self._removed and time.monotonic() > self._asked + ONLINE_EVERY_S:
            self._removed, self._asked = self._list_removed(), time.monotonic()
        return number in self._removed

    def wait(self, is_enough: Callable[[set[int]], bool], purpose: str) -> set[int]:
        """Wait until enough nodes are online, and return their numbers; the text of an error starts with `purpose`."""
        end = time.monotonic() + self._options.start_timeout
        n_logged = -1
        while not is_enough(online := self.online()):
            if time.monotonic() > end:
                raise RunError(
                    f"{purpose}: got {len(online)} online after {self._options.start_timeout:g} seconds "
                    "(start-timeout); start the missing nodes (their logs say why they cannot connect), and run again: "
                    "the run continues after its last round"
                )
            if len(online) != n_logged:
                self.log(f"{purpose}: {len(online)} online")
                n_logged = len(online)
            time.sleep(self._options.poll)
        return online

    def exchange(
        self, messages: Mapping[int, WorkerMessage], group: str, timeout: float | None = None
    ) -> dict[int, WorkerMessage | Fault]:
        """Send messages to nodes, and return each node's reply, or why there is none.

        Args:
            timeout: seconds to wait; by default the timeout of a round.
        """
        timeout = timeout or self._options.round_timeout
        end = time.monotonic() + timeout
        # A node that was away must not handle messages of old rounds; Flower itself lets clocks differ by this much.
        ttl = timeout + CLOCK_SKEW_S
        flower_messages = [
            Message(
                pack_record(message),
                message_type=MESSAGE_TYPES.get(message.head["kind"], MessageType.TRAIN),
                dst_node_id=node,
                group_id=group,
                ttl=ttl,
            )
            for node, message in messages.items()
        ]
        # A reply names its message; as its sender it may name the SuperLink. A message that is too large for the
        # SuperLink has no id, and if all of them are too large, the list is empty.
        ids = self._call(self._grid.push_messages, flower_messages) or [""] * len(flower_messages)
        waiting = {id_: node for id_, node in zip(ids, messages, strict=True) if id_}
        replies: dict[int, WorkerMessage | Fault] = dict.fromkeys(messages, Fault("offline", "could not be reached"))
        while waiting:
            is_late = time.monotonic() > end  # look once more after the end: the server itself may have slept
            for reply in self._call(self._grid.pull_messages, list(waiting)):
                if (node := waiting.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    replies[node] = _read_reply(reply)
            if is_late:
                break
            # This thread looks, because Flower does not say that its connection can serve several threads.
            if time.monotonic() > self._looked + ONLINE_EVERY_S:
                self.online()
            if waiting:
                time.sleep(self._options.poll)
        late = Fault("late", f"sent no reply within {timeout:g} seconds")
        return replies | dict.fromkeys(waiting.values(), late)

    def _call(self, call: Callable[..., Iterable[T]], *arguments: Any) -> list[T]:
        """Call Flower's grid, and call it again if the SuperLink went away meanwhile.

        Flower waits for a SuperLink that restarts, with two exceptions. It gives up if the connection broke in a TLS
        handshake. And if the SuperLink stored an object but could not say so, it refuses the same object the second
        time. A message that is pushed again keeps its id, so it reaches its node once.
        """
        for attempt in range(1, CALLS):
            try:
                return list(call(*arguments))
            except Exception as error:
                self.log(f"call {attempt} of the SuperLink failed ({type(error).__name__}: {error}); calling again")
                time.sleep(self._options.poll)
        return list(call(*arguments))


def _read_reply(reply: Message) -> WorkerMessage | Fault:
    """Read a node's reply. The node's own text of an error may hold data, so it is not repeated."""
    if reply.has_error() and reply.error.code == OFFLINE_CODE:
        return Fault("offline", "went offline")
    if reply.has_error():
        return Fault("failed", f"failed (Flower's error code {reply.error.code})")
    try:
        message = unpack_record(reply.content)
    except MessageFormatError as error:
        return Fault("refused", f"sent no valid reply: {error}")
    if message.head.get("kind") == "failed":
        name = re.sub(r"\W", "", str(message.head.get("error")))[:60]
        is_lost = name == LostStateError.__name__
        return Fault("lost_state" if is_lost else "failed", f"failed ({name}; its error.log says why)")
    return message
