"""The server's side of the network: which nodes are online, and messages to and from them."""

import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ..deployment import Deployment
from ..errors import RunError
from ..wire import Parcel
from .codec import WireError, packed, unpacked

CLOCKS = 5
"""Seconds that a node's clock may be ahead of the server's."""

OFFLINE = 5
"""Flower's error code for a node that went away before it had answered."""

TYPES = {"hello": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


class Answer(NamedTuple):
    """What came of a message to a node: a parcel, or why there is none, and the kind of the node's error."""

    parcel: Parcel | None
    why: str = ""
    error: str = ""


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

    def exchange(
        self, parcels: Mapping[int, Parcel], group: str, timeout: float | None = None
    ) -> dict[int, Answer]:
        """Send parcels to nodes, and wait for the answers until the time is over, by default that of a round."""
        timeout = timeout or self._deployment.round_timeout
        end = time.monotonic() + timeout
        # A node that was away must not work off rounds that are over; Flower itself lets clocks differ by this much.
        ttl = timeout + CLOCKS
        messages = [
            Message(packed(p), message_type=TYPES[p.head["kind"]], dst_node_id=node, group_id=group, ttl=ttl)
            for node, p in parcels.items()
        ]
        # An answer names the message that it answers; who it says that it is from may be the SuperLink. What is too
        # large for the SuperLink has no number, and nothing has if all of it was.
        numbers = list(self._grid.push_messages(messages)) or [""] * len(messages)
        waiting = {message: node for message, node in zip(numbers, parcels, strict=True) if message}
        answers = {node: Answer(None, "could not be reached") for node in parcels}
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
            waiting.values(), Answer(None, f"gave no answer within {timeout:g} seconds")
        )


def _read(reply: Message) -> Answer:
    """A node's answer; its own words for an error may hold data, and are not repeated."""
    if reply.has_error() and reply.error.code == OFFLINE:
        return Answer(None, "went offline")
    if reply.has_error():
        return Answer(None, f"failed (Flower's error code {reply.error.code})")
    try:
        parcel = unpacked(reply.content)
    except WireError as error:
        return Answer(None, f"sent what is no answer: {error}")
    if parcel.head.get("kind") == "failed":
        kind = re.sub(r"\W", "", str(parcel.head.get("error")))[:60]
        return Answer(None, f"failed ({kind}; its error.log says why)", kind)
    return Answer(parcel)
