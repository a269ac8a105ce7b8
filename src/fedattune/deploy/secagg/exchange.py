"""Send the steps of one session to the nodes, and collect their sum; nodes that fall away are left out."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import FedAttuneError
from ...core.faults import Fault
from ...training.backends.message import WorkerMessage
from ..grid import NodeGrid
from ..operate.audit import count_bytes
from .methods import MIN_NODES
from .ring import Fixed
from .server import ServerSession
from .session import Session

STEP_TIMEOUT_S = 60.0
"""Seconds to wait for the steps without training, which take a node less than a second."""


class SessionMember(NamedTuple):
    """A node that is asked to take part in a session.

    Attributes:
        number: Flower's number of the node.
        contributes: for each block, whether numbers of its clients are in it.
        work: what its clients do.

    """

    number: int
    contributes: list[bool]
    work: WorkerMessage


class SessionOutcome(NamedTuple):
    """The end of a session.

    Attributes:
        total: the sum; None if there is none.
        survivors: nodes whose numbers are in the sum.
        faults: node -> why it left the session.
        failure: why there is no sum.
        sent, received: bytes of all messages and replies.
        seconds: time of the step in which the nodes trained.

    """

    total: Fixed | None
    survivors: frozenset[int]
    faults: Mapping[int, Fault]
    failure: str
    sent: int
    received: int
    seconds: float


class SessionExchange:
    """A session over the nodes of a grid.

    Args:
        grid: the connection to the nodes.
        session: what all nodes must agree on.
        head: the keys of every message's head: run, round and model.
        members: index of a node -> what it is asked.
        next_number: returns the number of the next messages; the session's own number was the last one.
        step_timeout: seconds to wait for the steps without training.

    """

    def __init__(
        self,
        grid: NodeGrid,
        session: Session,
        head: Mapping[str, Any],
        members: Mapping[int, SessionMember],
        next_number: Callable[[], list[int]],
        step_timeout: float,
    ) -> None:
        self._grid, self._session, self._head = grid, session, head
        self._members, self._next_number = members, next_number
        self._step_timeout = min(step_timeout, STEP_TIMEOUT_S)
        self._server = ServerSession(session)
        self._ids: dict[int, str] = {}  # index of a node -> its id in the session
        self._active = set(members)
        self._faults: dict[int, Fault] = {}
        self._sent = self._received = 0
        self._seconds = 0.0

    def run(self) -> SessionOutcome:
        """Go through all steps, as long as enough nodes are left."""
        total: Fixed | None = None
        survivors: frozenset[int] = frozenset()
        failure = ""
        try:
            for step in (self._agree, self._share, self._collect):
                step()
                if len(self._active) < MIN_NODES:
                    return self._end(
                        None, frozenset(), f"{len(self._active)} nodes were left of {len(self._members)}"
                    )
            survivors = frozenset(self._active)
            self._sign()
            self._unmask()
            total = self._server.finish()
        except FedAttuneError as error:
            failure = str(error)
            total, survivors = None, frozenset()
        return self._end(total, survivors, failure)

    def _end(self, total: Fixed | None, survivors: frozenset[int], failure: str) -> SessionOutcome:
        faults = {i: fault for i, fault in self._faults.items() if i not in survivors}
        return SessionOutcome(total, survivors, faults, failure, self._sent, self._received, self._seconds)

    def _agree(self) -> None:
        session = self._session.model_dump()
        contents = {
            i: {"session": session, "contributes": self._members[i].contributes} for i in self._active
        }
        for i, reply in self._ask("keys", contents, number=self._session.number).items():
            self._take(i, self._add_advert, i, reply.head.get("advert"))

    def _add_advert(self, i: int, advert: object) -> None:
        self._ids[i] = self._server.add_advert(advert)

    def _share(self) -> None:
        content = {"adverts": [advert.to_json() for advert in self._server.adverts.values()]}
        for i, reply in self._ask("shares", dict.fromkeys(self._active, content)).items():
            told = reply.head.get("threshold"), reply.head.get("shares")
            self._take(i, self._server.add_shares, self._ids[i], *told)

    def _collect(self) -> None:
        contents = {
            i: {"shares": self._server.select_shares(self._ids[i]), "inner": self._members[i].work.head}
            for i in self._active
        }
        start = time.monotonic()
        replies = self._ask("masked", contents, has_work=True)
        self._seconds = time.monotonic() - start
        for i, reply in replies.items():
            masked = reply.tensors.get("masked")
            numbers = np.zeros(0, np.int64) if masked is None else masked.numpy()
            if numbers.dtype == np.int64:
                numbers = numbers.view(np.uint64)
            self._take(i, self._server.add_masked, self._ids[i], numbers)

    def _sign(self) -> None:
        content = {"survivors": self._server.survivors, "dropped": self._server.dropped}
        for i, reply in self._ask("survivors", dict.fromkeys(self._active, content)).items():
            self._server.signatures[self._ids[i]] = str(reply.head.get("signature"))[:1000]

    def _unmask(self) -> None:
        content = {"signatures": self._server.signatures}
        for i, reply in self._ask("unmask", dict.fromkeys(self._active, content)).items():
            shares = reply.head.get("shares")
            told = shares if isinstance(shares, Mapping) else {}
            self._take(i, self._server.add_shares_of_masks, self._ids[i], told.get("seeds"), told.get("keys"))

    def _take(self, i: int, take: Callable[..., None], *values: Any) -> None:
        """Take what a node replied; leave the node out if it cannot be taken."""
        try:
            take(*values)
        except FedAttuneError as error:
            self._lose(i, Fault("refused", str(error)))

    def _lose(self, i: int, fault: Fault) -> None:
        self._active.discard(i)
        self._faults.setdefault(i, fault)

    def _ask(
        self,
        step: str,
        contents: Mapping[int, Mapping[str, Any]],
        *,
        number: list[int] | None = None,
        has_work: bool = False,
    ) -> dict[int, WorkerMessage]:
        """Send a step to the nodes that are left; return the replies that belong to it."""
        head = {
            **self._head,
            "kind": f"secure-{step}",
            "number": number or self._next_number(),
            "session": self._session.digest,
        }
        messages = {
            i: WorkerMessage({**head, **content}, self._members[i].work.tensors if has_work else {})
            for i, content in contents.items()
        }
        outcomes = self._grid.exchange(
            {self._members[i].number: message for i, message in messages.items()},
            str(self._session.round),
            None if has_work else self._step_timeout,
        )
        replies: dict[int, WorkerMessage] = {}
        for i, message in messages.items():
            self._sent += count_bytes(message)
            reply = outcomes[self._members[i].number]
            if isinstance(reply, Fault):
                self._lose(i, reply)
                continue
            self._received += count_bytes(reply)
            if any(
                reply.head.get(key) != head[key] for key in ("kind", "token", "algorithm", "seed", "round")
            ):
                self._lose(i, Fault("refused", "replied for another session or step"))
            else:
                replies[i] = reply
        return replies
