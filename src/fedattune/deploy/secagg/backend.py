"""The clients of a deployment under secure aggregation, for the round loop: each exchange is a session over nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...core.params import Params
from ...core.payload import Payload
from ...runs.context import RunContext
from ...training.backends.base import TrainReply, TrainRequest
from ...training.backends.message import SECURE_FORMAT, WorkerMessage, join_messages
from ...training.backends.remote import select_ids, slice_payload
from ...training.clients.evaluation import PointScores
from ...training.clients.state import PayloadFactory
from ..grid import NodeGrid
from ..server.monitoring import MonitoredBackend
from ..server.registration import NodeRegistry
from .exchange import SessionExchange, SessionMember
from .layout import find_weighting, list_tensors, plan_blocks, plan_part, unpack_scores, unpack_upload
from .methods import require_sums
from .ring import Fixed
from .session import Block, Session

Group = Mapping[int, WorkerMessage]
"""The same message for each node that it concerns, by the node's index."""


class GroupSum(NamedTuple):
    """The outcome of one message to many nodes.

    Attributes:
        round: number of the round.
        blocks: `upload` and `scores` -> the sum; empty if there is none.
        survivors: nodes whose numbers are in the sums.
        reasons: node -> why its numbers are not.

    """

    round: int
    blocks: Mapping[str, Fixed]
    survivors: frozenset[int]
    reasons: Mapping[int, str]


class SecureBackend(MonitoredBackend):
    """Run clients at nodes that tell sums only.

    All clients of a round are handed to the server rule with the same upload, the mean; the scores are of one client
    that stands for all. So the round loop and the rules are those of every other run.

    Args:
        context, make_payload, grid, registry, key: see `FlowerBackend`.

    """

    def __init__(
        self,
        context: RunContext,
        make_payload: PayloadFactory,
        grid: NodeGrid,
        registry: NodeRegistry,
        key: Mapping[str, Any],
    ) -> None:
        super().__init__(context, make_payload, grid, registry, key)
        self.traits = replace(self.traits, merges_clients=True)
        self._sums = require_sums(str(key["algorithm"]), context.algorithm)
        self._tensors = list_tensors(self._expected_upload, self.statistics)
        for name in self._tensors:
            find_weighting(name, self._sums)  # a client rule whose upload has no sum is refused here
        self._done: dict[tuple[str, int], GroupSum] = {}
        self._work_seconds = 0.0  # of the last session, without the steps around the training

    @property
    def can_save(self) -> bool:  # type: ignore[override]
        """Tell whether the nodes stand at the server's round."""
        return not self._done

    def train(
        self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory
    ) -> TrainReply:
        """Train clients on their nodes, in one session with the evaluation that waits."""
        if self._is_alone:
            if ("train", request.round) not in self._done:
                self._train_ahead(request, make_payload)
            return self._read_training(request, payload, self._done.pop(("train", request.round)))
        groups = [self.make_training(request, payload, make_payload)]
        (r, late), self._late = self._late, (0, {})
        if late:
            groups.insert(0, late)
        sums = self._sum(groups)
        if late:
            self._late_scores = r, self._read_scores(sums[0], "evaluate")
        return self._read_training(request, payload, sums[-1])

    def _train_ahead(self, request: TrainRequest, make_payload: PayloadFactory) -> None:
        """Let clients that exchange nothing train and evaluate for all rounds that fit into one session."""
        settings = self.context.settings
        last = min(request.round + self._count_rounds() - 1, settings.rounds)
        keys: list[tuple[str, int]] = []
        groups: list[Group] = []
        for r in range(request.round, last + 1):
            is_evaluated = r == settings.rounds or not r % settings.eval_every
            more = TrainRequest.draw(
                self.context, r, update_server=request.update_server, should_evaluate=is_evaluated
            )
            keys.append(("train", r))
            groups.append(self.make_training(more, make_payload(more.ids), make_payload))
            if is_evaluated:
                keys.append(("evaluate", r))
                groups.append(self.make_evaluation(r, make_payload, None))
        sums = self._sum(groups)
        if last > request.round and not any(one.survivors for one in sums):
            sums = self._sum(groups)  # many rounds hang on one session, so it gets a second chance
        self._done = dict(zip(keys, sums, strict=True))
        self._seconds_per_round = self._work_seconds / (last - request.round + 1)

    def evaluate_received(self, r: int, make_payload: PayloadFactory, w: Params | None) -> list[PointScores]:
        """Return the summed scores after the communication of round r."""
        if self._is_alone and ("evaluate", r) in self._done:
            return self._read_scores(self._done.pop(("evaluate", r)), "evaluate")
        return self._read_scores(self._sum([self.make_evaluation(r, make_payload, w)])[0], "evaluate")

    def _sum(self, groups: Sequence[Group]) -> list[GroupSum]:
        """Sum what nodes answer to some groups of messages, in one session."""
        nodes, numbers = self._registry.nodes, self._registry.locate(self._grid)
        asked = sorted({i for group in groups for i in group})
        r = self._round = max(message.head["round"] for group in groups for message in group.values())
        reasons = {i: "was offline" for i in asked if i not in numbers}
        old = "has a version of FedAttune without secure aggregation; upgrade it"
        reasons |= {i: old for i in asked if i in numbers and self._format(i) < SECURE_FORMAT}
        session = self._plan_session(groups, r)
        members = {
            i: SessionMember(
                numbers[i], self._find_contributions(session, groups, i), self._make_work(groups, i)
            )
            for i in asked
            if i not in reasons
        }
        exchange = SessionExchange(
            self._grid,
            session,
            {**self._key, "round": r},
            members,
            self._next_number,
            self._registry.deployment.round_timeout,
        )
        outcome = exchange.run()
        self._work_seconds = outcome.seconds
        self.bytes_sent += outcome.sent
        self.bytes_received += outcome.received
        reasons |= outcome.reasons
        if outcome.total is None:
            self._grid.log(f"round {r}: no sum, and nothing is revealed: {outcome.failure}")
            reasons = {
                i: reasons.get(i, f"took part, but there was no sum: {outcome.failure}") for i in asked
            }
        for i, reason in sorted(reasons.items()):
            self._grid.log(f"round {r}: {nodes[i].label} {reason}")
        for i in outcome.survivors:
            self._last[self.worker_clients[i]] = r
        self.monitor.record_exchange({i: reasons.get(i) for i in asked}, self.bytes_sent, self.bytes_received)
        return [
            GroupSum(
                session.parts[number].round,
                _slice_blocks(outcome.total, session.blocks, number),
                outcome.survivors & group.keys(),
                {i: f"{nodes[i].label} {reasons[i]}" for i in group if i in reasons},
            )
            for number, group in enumerate(groups)
        ]

    def _next_number(self) -> list[int]:
        return [self._registry.attempt, next(self._numbers)]

    def _plan_session(self, groups: Sequence[Group], r: int) -> Session:
        """Describe a session; every node compares it with what it is sent."""
        deployment = self._registry.deployment
        n_values = sum(value.numel() for value in self._tensors.values())
        firsts = [next(iter(group.values())) for group in groups]
        blocks: list[Block] = []
        for number, first in enumerate(firsts):
            kind, is_evaluated = first.head["kind"], first.head.get("should_evaluate", True)
            blocks += plan_blocks(number, kind, n_values, has_scores=is_evaluated)
        return Session(
            **self._key,
            round=r,
            number=self._next_number(),
            bits=deployment.secure_bits,
            clip=deployment.secure_clip,
            nodes=len(self._registry.nodes),
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
            head = message.head
            flags.append(bool(set(head["ids"]) & set(head["cohort"]) - set(head["dropouts"])))
        return flags

    def _make_work(self, groups: Sequence[Group], i: int) -> WorkerMessage:
        """Join a node's messages; each says which part of the session it is."""
        parts = []
        for number, group in enumerate(groups):
            if i in group:
                group[i].head.update(self._key, part=number)
                parts.append(group[i])
        work = join_messages(parts)
        work.head.update(
            self._key,
            last=self._last[self.worker_clients[i]].tolist(),
            clients=self._registry.nodes[i].clients,
            n_clients=self.context.n_clients,
        )
        return work

    def _read_scores(self, one: GroupSum, kind: str) -> list[PointScores]:
        """Read summed scores: of one client with the number after the last, which stands for all."""
        if "scores" not in one.blocks:
            return []
        if one.reasons:
            missing = ", ".join(self._registry.nodes[i].label for i in sorted(one.reasons))
            self.notes.append(
                f"{self._key['algorithm']}: the scores of round {one.round} are without the clients of {missing}, so "
                "they are of other rows than those of other methods"
            )
        return unpack_scores(one.blocks["scores"], kind, self.context.n_clients)

    def _read_training(self, request: TrainRequest, payload: Payload | None, one: GroupSum) -> TrainReply:
        """Read the sum of uploads as the same upload of every client behind it."""
        assert payload is not None  # no method that answers uploads comes here
        self._trained_scores = self._read_scores(one, "train")
        asked = select_ids(request.ids, request.cohort)
        asked = asked[~torch.isin(asked, request.dropouts)]
        faults: dict[int, str] = {}
        for i, reason in one.reasons.items():
            faults |= dict.fromkeys(select_ids(asked, self.worker_clients[i]).tolist(), reason)
        ids = asked[:0]
        if one.survivors:
            ids = select_ids(asked, torch.cat([self.worker_clients[i] for i in sorted(one.survivors)]))
        if "upload" not in one.blocks:
            return TrainReply(ids[:0], payload.rows(ids[:0]), Payload(Params()), Params(), faults=faults)
        counts, upload, buffers = unpack_upload(
            one.blocks["upload"],
            self._sums,
            self._registry.deployment.secure_bits,
            self._expected_upload,
            self.statistics,
            len(ids),
        )
        diverged: list[int] = []
        if counts["diverged"]:
            diverged = ids.tolist() if not counts["trained"] else []
            n_diverged = counts["diverged"]
            sentence = (
                f"round {request.round}: training diverged on {n_diverged} clients; a sum does not say which"
            )
            self._grid.log(sentence)
            self.notes.append(f"{self._key['algorithm']}: {sentence}")
        if not counts["clients"]:
            ids = ids[:0]
        n = len(ids)
        rows = torch.searchsorted(request.ids, ids)
        return TrainReply(
            ids,
            slice_payload(payload, rows, len(request.ids)),
            Payload(
                upload.params.rows(0).repeat(n), {k: v.rows(0).repeat(n) for k, v in upload.extra.items()}
            ),
            buffers.rows(0).repeat(n),
            counts["trained"],
            counts["steps"],
            diverged,
            faults,
        )


def _slice_blocks(total: Fixed | None, blocks: Sequence[Block], part: int) -> dict[str, Fixed]:
    """Return the sums of one part of a session."""
    found: dict[str, Fixed] = {}
    start = 0
    for block in blocks:
        if total is not None and block.part == part:
            found[block.what] = total[start : start + block.length]
        start += block.length
    return found
