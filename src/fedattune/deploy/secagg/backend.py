"""Secure sums as a transport: each exchange is a session over nodes, and its sum is handed on as one reply."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.faults import Fault
from ...core.payload import Payload
from ...runs.context import RunContext
from ...training.backends.message import WorkerMessage, join_messages
from ...training.backends.remote import Group, Outcome
from ...training.clients.state import PayloadFactory
from ..grid import NodeGrid
from ..server.backend import NodeTransport, Observer, count_rounds
from ..server.registration import NodeRegistry
from .exchange import SessionExchange, SessionMember, SessionOutcome
from .layout import find_weighting, list_tensors, plan_blocks, plan_part, unpack_scores, unpack_upload
from .methods import require_sums
from .ring import Fixed
from .session import Block, Session


class SecureTransport(NodeTransport):
    """Carry messages to nodes that tell sums only.

    The sum is handed on as the reply of one node, in which all clients of the round upload the mean, and in which the
    scores are of one client that stands for all. So the round loop and the rules are those of every other run.

    Args:
        context, make_payload, grid, registry, key, observer: see `NodeTransport`.

    """

    merges_clients = True

    def __init__(
        self,
        context: RunContext,
        make_payload: PayloadFactory,
        grid: NodeGrid,
        registry: NodeRegistry,
        key: Mapping[str, Any],
        observer: Observer,
    ) -> None:
        super().__init__(context, make_payload, grid, registry, key, observer)
        self._sums = require_sums(str(key["algorithm"]), context.algorithm)
        self._tensors = list_tensors(self.example, context.initial_statistics)
        for name in self._tensors:
            find_weighting(name, self._sums)  # a client rule whose upload has no sum is refused here

    def exchange(self, groups: Sequence[Group], *, is_long: bool = False) -> list[Outcome]:
        """Sum what nodes answer to groups of messages, in one session; see `NodeTransport.exchange`."""
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
                numbers[i], self._find_contributions(session, groups, i), self._make_work(groups, i)
            )
            for i in asked
            if i in numbers
        }
        exchange = SessionExchange(
            self.grid,
            session,
            {**self.key, "round": r},
            members,
            self.next_number,
            self.registry.deployment.round_timeout,
        )
        outcome = exchange.run()
        self.seconds = outcome.seconds
        self.bytes_sent += outcome.sent
        self.bytes_received += outcome.received
        faults = {i: Fault("offline", "was offline") for i in asked if i not in numbers} | dict(
            outcome.faults
        )
        if outcome.total is None:
            self.grid.log(f"round {r}: no sum, and nothing is revealed: {outcome.failure}")
            rest = Fault("failed", f"took part, but there was no sum: {outcome.failure}")
            faults = {i: faults.get(i, rest) for i in asked}
        faults = {i: self.report(r, i, fault) for i, fault in sorted(faults.items())}
        for i in outcome.survivors:
            self.last[self.worker_clients[i]] = r
        self.observer.record_exchange({i: faults.get(i) for i in asked}, self.bytes_sent, self.bytes_received)
        return [
            Outcome(
                self._make_reply(session, outcome, number, group, faults),
                {i: faults[i] for i in group if i in faults},
            )
            for number, group in enumerate(groups)
        ]

    def _plan_session(self, groups: Sequence[Group], r: int) -> Session:
        """Describe a session; every node compares it with what it is sent."""
        deployment = self.registry.deployment
        n_values = sum(value.numel() for value in self._tensors.values())
        firsts = [next(iter(group.values())) for group in groups]
        blocks: list[Block] = []
        for number, first in enumerate(firsts):
            kind, is_evaluated = first.head["kind"], first.head.get("should_evaluate", True)
            blocks += plan_blocks(number, kind, n_values, has_scores=is_evaluated)
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
        members = self.worker_clients[i]
        is_evaluated = bool(torch.isin(self.context.eval_ids, members).any())
        flags = []
        for block in session.blocks:
            message = groups[block.part].get(i)
            if message is None or block.what == "scores":
                flags.append(message is not None and is_evaluated)
                continue
            flags.append(bool(_list_uploading(message)))
        return flags

    def _make_work(self, groups: Sequence[Group], i: int) -> WorkerMessage:
        """Join a node's messages; each says which part of the session it is."""
        parts = []
        for number, group in enumerate(groups):
            if i in group:
                group[i].head.update(self.key, part=number)
                parts.append(group[i])
        return self.address(join_messages(parts), i)

    def _make_reply(
        self,
        session: Session,
        outcome: SessionOutcome,
        number: int,
        group: Group,
        faults: Mapping[int, Fault],
    ) -> dict[int, WorkerMessage]:
        """Make the reply of all survivors to one group: the mean as the upload of each of their clients."""
        blocks = _slice_blocks(outcome.total, session.blocks, number)
        survivors = sorted(outcome.survivors & group.keys())
        if not survivors:
            return {}
        planned = session.parts[number]
        reply = WorkerMessage({"ids": [], "n_trained": 0, "steps": 0, "diverged": []})
        if "scores" in blocks:
            reply.put_scores(unpack_scores(blocks["scores"], planned.kind, self.context.n_clients))
            if missing := [self.registry.nodes[i].label for i in sorted(group.keys() & faults.keys())]:
                self.notes.append(
                    f"{self.key['algorithm']}: the scores of round {planned.round} are without the clients of "
                    f"{', '.join(missing)}, so they are of other rows than those of other methods"
                )
        if "upload" in blocks:
            ids = sorted(i for node in survivors for i in _list_uploading(group[node]))
            self._put_upload(reply, planned.round, ids, blocks["upload"])
        return {survivors[0]: reply}

    def _put_upload(self, reply: WorkerMessage, r: int, ids: list[int], total: Fixed) -> None:
        counts, upload, buffers = unpack_upload(
            total,
            self._sums,
            self.registry.deployment.secure_bits,
            self.example,
            self.context.initial_statistics,
            len(ids),
        )
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


def _list_uploading(message: WorkerMessage) -> set[int]:
    """List the clients of a node that upload in answer to a training."""
    head = message.head
    return set(head["ids"]) & set(head["cohort"]) - set(head["dropouts"])


def _slice_blocks(total: Fixed | None, blocks: Sequence[Block], part: int) -> dict[str, Fixed]:
    """Return the sums of one part of a session."""
    found: dict[str, Fixed] = {}
    start = 0
    for block in blocks:
        if total is not None and block.part == part:
            found[block.what] = total[start : start + block.length]
        start += block.length
    return found
