"""Secure sums as a transport: each exchange is a session over nodes, and its sum is handed on as one reply."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ...core.errors import FedAttuneError
from ...core.faults import Fault
from ...core.payload import Payload
from ...engine.base import EvalPart
from ...runs.context import RunContext
from ...training.backends.message import WorkerMessage, join_messages
from ...training.backends.remote import Group, Outcome
from ..grid import NodeGrid
from ..operate.audit import count_bytes
from ..server.backend import NodeTransport, count_rounds
from . import MIN_NODES, ImpossibleSumError, SessionMismatchError
from .layout import (
    check_scores,
    check_upload,
    find_weighting,
    list_tensors,
    list_uploading,
    plan_blocks,
    plan_part,
    unpack_scores,
    unpack_upload,
)
from .methods import find_weightings
from .ring import Fixed
from .session import Block, ServerSession, Session, SessionPart

T = TypeVar("T")

STEP_TIMEOUT_S = 60.0
"""Seconds to wait for the steps without training, which take a node less than a second."""


class SessionMember(NamedTuple):
    """A node that is asked to take part in a session: Flower's number of it, and its name; for each block, whether
    numbers of its clients are in it; and what its clients do.
    """

    number: int
    name: str
    contributes: list[bool]
    work: WorkerMessage


class SessionExchange:
    """A session over the nodes of a grid.

    Args:
        head: the keys of every message's head: run, round and model.
        members: index of a node -> what it is asked.
        next_number: returns the number of the next messages; the session's own number was the last one.
        step_timeout: seconds to wait for the steps without training.

    Attributes:
        survivors: nodes whose numbers are in the sum.
        faults: node -> why it left the session.
        remarks: what was found of nodes that depart from the protocol, if there is a sum all the same.
        failure: why there is no sum.
        sent, received: bytes of all messages and replies.
        seconds: time of the step in which the nodes trained.
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
        self.survivors: frozenset[int] = frozenset()
        self.faults: dict[int, Fault] = {}
        self.remarks: list[str] = []
        self.failure = ""
        self.sent = self.received = 0
        self.seconds = 0.0

    def run(self) -> Fixed | None:
        """Go through all steps, as long as enough nodes are left; return the sum, or None if there is none."""
        try:
            for step in (self._agree, self._share, self._collect):
                step()
                if len(self._active) < MIN_NODES:
                    self.failure = f"{len(self._active)} nodes were left of {len(self._members)}"
                    return None
            for i, why in self._find_conflicts().items():
                self._lose(i, Fault("refused", why))
            survivors = frozenset(self._active)
            self._sign()
            self._unmask()
            total = self._server.finish()
        except FedAttuneError as error:
            self.failure = str(error)
            return None
        self.survivors = survivors
        found = [replace(self.faults[i], node=self._members[i].name) for i in sorted(self.faults.keys() & survivors)]
        self.remarks = [*self._server.findings, *(str(fault) for fault in found if fault.kind == "refused")]
        self.faults = {i: fault for i, fault in self.faults.items() if i not in survivors}
        return total

    def _find_conflicts(self) -> dict[int, str]:
        left_out = self._server.leave_out_conflicts()
        return {i: left_out[id_] for i, id_ in self._ids.items() if id_ in left_out}

    def _agree(self) -> None:
        session = self._session.model_dump()
        contents = {i: {"session": session, "contributes": self._members[i].contributes} for i in self._active}
        for i, reply in self._ask("keys", contents, number=self._session.number).items():
            member = self._members[i]
            told = reply.head.get("advert"), member.contributes, member.name
            if (id_ := self._take(i, self._server.add_advert, *told)) is not None:
                self._ids[i] = id_

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
        self.seconds = time.monotonic() - start
        for i, reply in replies.items():
            self._take(i, self._add_masked, self._ids[i], reply)

    def _add_masked(self, id_: str, reply: WorkerMessage) -> None:
        masked = reply.tensors.get("masked")
        if masked is None or masked.dtype != torch.int64:  # NumPy does not know all types of PyTorch
            found = "no masked numbers" if masked is None else f"masked numbers of type {masked.dtype}"
            raise SessionMismatchError(f"sent {found}, expected {self._session.length} of torch.int64")
        self._server.add_masked(id_, masked.numpy().view(np.uint64), reply.head.get("unfit"))

    def _sign(self) -> None:
        content = {"survivors": self._server.survivors, "dropped": self._server.dropped}
        for i, reply in self._ask("survivors", dict.fromkeys(self._active, content)).items():
            self._take(i, self._server.add_signature, self._ids[i], reply.head.get("signature"))

    def _unmask(self) -> None:
        content = {"signatures": self._server.signatures}
        for i, reply in self._ask("unmask", dict.fromkeys(self._active, content)).items():
            self._take(i, self._server.add_shares_of_masks, self._ids[i], reply.head.get("masks"))

    def _take(self, i: int, take: Callable[..., T], *values: Any) -> T | None:
        """Take what a node replied; leave the node out if it cannot be taken."""
        try:
            return take(*values)
        except FedAttuneError as error:
            self._lose(i, Fault("refused", str(error)))
            return None

    def _lose(self, i: int, fault: Fault) -> None:
        self._active.discard(i)
        self.faults.setdefault(i, fault)

    def _ask(
        self,
        step: str,
        contents: Mapping[int, Mapping[str, Any]],
        *,
        number: list[int] | None = None,
        has_work: bool = False,
    ) -> dict[int, WorkerMessage]:
        """Send a step to the nodes that are left; return the replies that belong to it."""
        number = number or self._next_number()
        head = {**self._head, "kind": f"secure-{step}", "number": number, "session": self._session.digest}
        messages = {
            i: WorkerMessage({**head, **content}, self._members[i].work.tensors if has_work else {})
            for i, content in contents.items()
        }
        requests = {self._members[i].number: message for i, message in messages.items()}
        timeout = None if has_work else self._step_timeout
        outcomes = self._grid.exchange(requests, str(self._session.round), timeout)
        replies: dict[int, WorkerMessage] = {}
        for i, message in messages.items():
            self.sent += count_bytes(message)
            reply = outcomes[self._members[i].number]
            if isinstance(reply, Fault):
                self._lose(i, reply)
                continue
            self.received += count_bytes(reply)
            if any(reply.head.get(key) != head[key] for key in ("kind", "token", "algorithm", "seed", "round")):
                self._lose(i, Fault("refused", "replied for another session or step"))
            else:
                replies[i] = reply
        return replies


class SecureTransport(NodeTransport):
    """Carry messages to nodes that tell sums only.

    The sum is handed on as the reply of one node, in which all clients of the round upload the mean, and in which the
    scores are of one client that stands for all. So the round loop and the rules are those of every other run.
    """

    merges_clients = True
    common_notes = (
        "numbers are of the rows of all clients together, and nothing is told of single clients: the server learned "
        "sums over nodes only (secure aggregation)",
    )

    def __init__(self, context: RunContext, *others: Any) -> None:
        super().__init__(context, *others)
        self._sums = find_weightings(str(self.key["algorithm"]), context.algorithm, context.settings)
        self._tensors = list_tensors(self.example, context.initial_statistics)
        for name in self._tensors:
            find_weighting(name, self._sums)  # a client rule whose upload has no sum is refused here

    def exchange(self, groups: Sequence[Group], *, is_long: bool = False) -> list[Outcome]:
        outcomes = self._sum(groups)
        if is_long and count_rounds(groups) > 1 and not any(outcome.replies for outcome in outcomes):
            outcomes = self._sum(groups)
        return outcomes

    def _sum(self, groups: Sequence[Group]) -> list[Outcome]:
        numbers = self.registry.locate(self.grid)
        asked = sorted({i for group in groups for i in group})
        r = max(message.head["round"] for group in groups for message in group.values())
        session = self._plan_session(groups, r)
        members = {
            i: SessionMember(
                numbers[i],
                self.registry.nodes[i].label,
                self._find_contributions(session, groups, i),
                self._make_work(groups, i),
            )
            for i in asked
            if i in numbers
        }
        head, timeout = {**self.key, "round": r}, self.registry.deployment.round_timeout
        exchange = SessionExchange(self.grid, session, head, members, self.next_number, timeout)
        total = exchange.run()
        self.seconds = exchange.seconds
        self.bytes_sent += exchange.sent
        self.bytes_received += exchange.received
        faults = {i: Fault("offline", "was offline") for i in asked if i not in numbers} | exchange.faults
        if total is None:
            self.grid.log(f"round {r}: no sum, and nothing is revealed: {exchange.failure}")
            rest = Fault("failed", f"took part, but there was no sum: {exchange.failure}")
            faults = {i: faults.get(i, rest) for i in asked}
        else:
            try:
                self._check_sums(session, total, exchange.survivors, groups)
            except ImpossibleSumError as error:
                self.note(f"round {r}: the sum is rejected: {error}")
                total, rest = None, Fault("refused", f"took part in a sum that is rejected: {error}")
                faults = {i: faults.get(i, rest) for i in asked}
        summed = exchange.survivors - faults.keys()
        faults = {i: self.report(r, i, fault) for i, fault in sorted(faults.items())}
        for sentence in exchange.remarks:
            self.note(f"round {r}: {sentence}")
        for i in summed:
            self.last[self.worker_clients[i]] = r
        self.monitor.record_exchange({i: faults.get(i) for i in asked}, self.bytes_sent, self.bytes_received)
        outcomes = []
        for number, group in enumerate(groups):
            lost = {i: faults[i] for i in group if i in faults}
            sums = _slice_blocks(total, session.blocks, number)
            survivors = sorted(summed & group.keys())
            replies = self._make_reply(session.parts[number], sums, survivors, group, lost) if survivors else {}
            outcomes.append(Outcome(replies, lost))
        return outcomes

    def _plan_session(self, groups: Sequence[Group], r: int) -> Session:
        """Describe a session; every node compares it with its messages."""
        deployment = self.registry.deployment
        n_values = sum(value.numel() for value in self._tensors.values())
        firsts = [next(iter(group.values())) for group in groups]
        blocks: list[Block] = []
        for number, first in enumerate(firsts):
            has_scores = first.head.get("should_evaluate", True)
            blocks += plan_blocks(number, first.head["kind"], n_values, has_scores=has_scores)
        return Session(
            **self.key,
            round=r,
            number=self.next_number(),
            bits=deployment.secure_bits,
            clip=deployment.secure_clip,
            nodes=len(self.registry.nodes),
            parts=[plan_part(first) for first in firsts],
            blocks=blocks,
        )

    def _find_contributions(self, session: Session, groups: Sequence[Group], i: int) -> list[bool]:
        """Tell for each block whether clients of a node are in it."""
        is_evaluated = bool(torch.isin(self.context.eval_ids, self.worker_clients[i]).any())
        return [
            (message := groups[block.part].get(i)) is not None
            and (is_evaluated if block.what == "scores" else bool(list_uploading(message)))
            for block in session.blocks
        ]

    def _check_sums(self, session: Session, total: Fixed, survivors: Collection[int], groups: Sequence[Group]) -> None:
        """Check each sum against what the server knows of the clients that can be in it."""
        for number, (planned, group) in enumerate(zip(session.parts, groups, strict=True)):
            sums = _slice_blocks(total, session.blocks, number)
            asked = [group[i] for i in survivors if i in group]
            if "upload" in sums:
                ids = [client for message in asked for client in list_uploading(message)]
                sizes = self.context.n_train[torch.tensor(ids, dtype=torch.int64)].tolist()
                n_trained = sum(len(message.head["ids"]) for message in asked)
                check_upload(sums["upload"], self._sums, session, self._tensors, sizes, n_trained)
            if "scores" in sums:
                there = [self.worker_clients[i] for i in survivors if i in group]
                ids = [client for some in there for client in some[torch.isin(some, self.context.eval_ids)].tolist()]
                parts: tuple[EvalPart, ...] = ("test", "validation")
                sizes_of = {part: self.context.federation.sizes(part)[ids].tolist() for part in parts}
                check_scores(sums["scores"], planned.kind, sizes_of)

    def _make_work(self, groups: Sequence[Group], i: int) -> WorkerMessage:
        """Join a node's messages; each says which part of the session it is."""
        parts = {number: group[i] for number, group in enumerate(groups) if i in group}
        for number, message in parts.items():
            message.head.update(self.key, part=number)
        return self.address(join_messages([*parts.values()]), i)

    def _make_reply(
        self,
        planned: SessionPart,
        sums: Mapping[str, Fixed],
        survivors: Sequence[int],
        group: Group,
        faults: Mapping[int, Fault],
    ) -> dict[int, WorkerMessage]:
        """Make the reply of all survivors to one group: the mean as the upload of each of their clients."""
        reply = WorkerMessage({"ids": [], "n_trained": 0, "steps": 0, "diverged": []})
        if "scores" in sums:
            reply.put_scores(unpack_scores(sums["scores"], planned.kind, self.context.n_clients))
            if missing := [self.registry.nodes[i].label for i in sorted(faults)]:
                self.notes.append(
                    f"{self.key['algorithm']}: the scores of round {planned.round} are without the clients of "
                    f"{', '.join(missing)}, so they are of other rows than those of other methods"
                )
        if "upload" in sums:
            ids = sorted(i for node in survivors for i in list_uploading(group[node]))
            self._put_upload(reply, planned.round, ids, sums["upload"])
        return {survivors[0]: reply}

    def _put_upload(self, reply: WorkerMessage, r: int, ids: list[int], total: Fixed) -> None:
        bits, statistics = self.registry.deployment.secure_bits, self.context.initial_statistics
        counts, upload, buffers = unpack_upload(total, self._sums, bits, self.example, statistics, len(ids))
        if n_diverged := counts["diverged"]:
            self.note(f"round {r}: training diverged on {n_diverged} clients; a sum does not say which")
            if not counts["trained"]:
                reply.head["diverged"] = ids
        reply.head.update(n_trained=counts["trained"], steps=counts["steps"])
        if counts["clients"]:
            reply.head["ids"] = ids
            extra = {k: v.rows(0).repeat(len(ids)) for k, v in upload.extra.items()}
            reply.put("upload", Payload(upload.params.rows(0).repeat(len(ids)), extra))
            reply.put("buffers", buffers.rows(0).repeat(len(ids)))


def _slice_blocks(total: Fixed | None, blocks: Sequence[Block], part: int) -> dict[str, Fixed]:
    found: dict[str, Fixed] = {}
    start = 0
    for block in blocks:
        if total is not None and block.part == part:
            found[block.what] = total[start : start + block.length]
        start += block.length
    return found
