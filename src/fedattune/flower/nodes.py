"""The server's side of the network: which nodes are online, and messages to and from them."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ..deployment import Deployment
from ..errors import RunError
from ..wire import Parcel
from .codec import WireError, packed, unpacked

TYPES = {"hello": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


class Answer(NamedTuple):
    """What came of a message to a node: a parcel, or why there is none; and after how many seconds."""

    parcel: Parcel | None
    why: str
    seconds: float


class Nodes:
    """Messages to nodes, which Flower knows by numbers; `say` tells the user what happens."""

    def __init__(self, grid: Grid, deployment: Deployment, say: Callable[[str], None]) -> None:
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

    def exchange(self, parcels: Mapping[int, Parcel], group: str) -> dict[int, Answer]:
        """Send parcels to nodes, and wait for the answers until the round's time is over."""
        began = time.monotonic()
        end = began + self._deployment.round_timeout
        messages = [
            Message(packed(p), message_type=TYPES[p.head["kind"]], dst_node_id=node, group_id=group)
            for node, p in parcels.items()
        ]
        # An answer names the message that it answers; who it says that it is from may be the SuperLink.
        asked = dict(zip(self._grid.push_messages(messages), parcels, strict=True))
        answers: dict[int, Answer] = {node: Answer(None, "could not be reached", 0.0) for node in parcels}
        waiting = {message: node for message, node in asked.items() if message}
        while waiting:
            for reply in self._pull(waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = _read(reply, time.monotonic() - began)
            if not waiting:
                break
            if time.monotonic() > end:
                late = f"gave no answer within {self._deployment.round_timeout:g} seconds"
                for node in waiting.values():
                    answers[node] = Answer(None, late, self._deployment.round_timeout)
                break
            time.sleep(self._deployment.poll)
        return answers

    def _pull(self, waiting: Mapping[str, Any]) -> Iterable[Message]:
        return list(self._grid.pull_messages(list(waiting)))


def _read(reply: Message, seconds: float) -> Answer:
    """A node's answer; its own words for an error may hold data, and are not repeated."""
    if reply.has_error():
        return Answer(None, f"failed (Flower's error code {reply.error.code})", seconds)
    try:
        parcel = unpacked(reply.content)
    except WireError as error:
        return Answer(None, f"sent what is no answer: {error}", seconds)
    if parcel.head.get("kind") == "failed":
        name = str(parcel.head.get("error"))[:60]
        return Answer(None, f"failed ({name}; its error.log says why)", seconds)
    return Answer(parcel, "", seconds)
