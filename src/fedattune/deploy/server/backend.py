"""The clients of a deployment, each at its node: the backend of the round loop, and the transport over Flower."""

import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.effect import Effect
from ...core.faults import Fault
from ...core.io import flatten_tree
from ...core.params import Params
from ...core.payload import Payload
from ...runs.checkpoint import restore_tree
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ...training.backends.base import BackendTraits, TrainReply, TrainRequest
from ...training.backends.message import WorkerMessage, join_messages
from ...training.backends.remote import Group, Outcome, RemoteBackend
from ...training.clients.evaluation import PointScores
from ...training.clients.state import PayloadFactory
from ..grid import NodeGrid
from .monitoring import RunMonitor
from .registration import NodeRegistry
from .reply_checks import RefusedReplyError, check_reply, make_expected_upload, split_reply

MAX_ROUNDS_PER_MESSAGE = 100
"""Rounds of clients that exchange nothing in one message; if its reply is lost, they train these rounds again."""

PER_CLIENT = {"sent", "pending", "is_first", "pending_statistics", "last"}
"""Entries of the state that have one row per client."""


class NodeTransport:
    """Carry messages to the nodes of a Flower grid, several of them in one.

    Args:
        key: identifies the run in messages: token, algorithm, seed, and hash of the model.

    Attributes:
        worker_clients: the numbers of the clients of each node, sorted.
        example: an upload of one client, with the names, types and shapes of all.
        last: (N,) the round of each client's last accepted reply; the client continues from there.
        bytes_sent, bytes_received: bytes of all tensors in messages, with those for evaluation.
        seconds: time that the last messages took.
        notes, common_notes: sentences about the run, and about all runs alike.
        merges_clients: whether replies are of all clients together.
    """

    merges_clients = False
    common_notes: Sequence[str] = ()

    def __init__(
        self,
        context: RunContext,
        make_payload: PayloadFactory,
        grid: NodeGrid,
        registry: NodeRegistry,
        key: Mapping[str, Any],
        monitor: RunMonitor,
    ) -> None:
        self.context, self.grid, self.registry = context, grid, registry
        self.key, self.monitor = dict(key), monitor
        self.worker_clients = [torch.tensor(sorted(node.clients.values())) for node in registry.nodes]
        personal = context.task.params.only(context.algorithm.personal.names(context.task.model))
        self.example = make_expected_upload(context, personal, make_payload)
        self.last = torch.zeros(context.n_clients, dtype=torch.int64)
        self._last_before = self.last
        self._numbers = itertools.count(1)
        self._missed: set[int] = set()  # nodes that were waited for in vain
        self.notes: list[str] = []
        self.bytes_sent = self.bytes_received = 0
        self.seconds = 0.0

    def exchange(self, groups: Sequence[Group], *, is_long: bool = False) -> list[Outcome]:
        """Send groups of messages, all of a node's in one; return what became of each group.

        Args:
            is_long: whether clients train many rounds by one message. Then nodes that are offline are waited for, and
                a lost message gets a second chance.
        """
        if is_long:
            self._wait_for({i for group in groups for i in group})
        start = time.monotonic()
        outcomes = self._send(groups)
        self.seconds = time.monotonic() - start
        lost = {i for outcome in outcomes for i in outcome.faults}
        if is_long and lost and count_rounds(groups) > 1:
            self._wait_for(lost)
            # A node that has done these rounds goes back first.
            again = self._send([{i: one for i, one in group.items() if i in lost} for group in groups])
            outcomes = [
                Outcome({**first.replies, **second.replies}, second.faults)
                for first, second in zip(outcomes, again, strict=True)
            ]
        return outcomes

    def forget(self, clients: Iterable[int]) -> None:
        for client in clients:
            self.last[client] = self._last_before[client]

    def _wait_for(self, nodes: Collection[int]) -> None:
        """Wait once for each node that is offline, because it would miss many rounds."""
        end = time.monotonic() + self.registry.deployment.round_timeout
        while missing := set(nodes) - self.registry.locate(self.grid).keys():
            if missing <= self._missed or time.monotonic() > end:
                break
            time.sleep(self.registry.deployment.poll)
        self._missed = missing

    def next_number(self) -> list[int]:
        """Return the number of the next message; nodes refuse messages with lower ones."""
        return [self.registry.attempt, next(self._numbers)]

    def address(self, message: WorkerMessage, i: int, **head: Any) -> WorkerMessage:
        """Add to a message for node `i` what it must know of the run and of its clients."""
        message.head.update(
            self.key,
            last=self.last[self.worker_clients[i]].tolist(),
            clients=self.registry.nodes[i].clients,
            n_clients=self.context.n_clients,
            **head,
        )
        return message

    def _send(self, groups: Sequence[Group]) -> list[Outcome]:
        """Send each node its messages in one; return the valid replies to each group."""
        self._last_before = self.last.clone()
        numbers, number = self.registry.locate(self.grid), self.next_number()
        parts: dict[int, list[WorkerMessage]] = {}
        for group in groups:
            for i, message in group.items():
                message.head.update(self.key)
                parts.setdefault(i, []).append(message)
        messages = {i: self.address(join_messages(some), i, number=number) for i, some in sorted(parts.items())}
        r = max((message.head["round"] for message in messages.values()), default=0)
        reachable = {numbers[i]: message for i, message in messages.items() if i in numbers}
        replies = self.grid.exchange(reachable, str(r))
        self.bytes_sent += sum(message.nbytes() for message in reachable.values())
        answers: dict[int, Iterator[WorkerMessage]] = {}
        faults: dict[int, Fault] = {}
        for i, message in messages.items():
            reply = replies[numbers[i]] if i in numbers else Fault("offline", "was offline")
            if isinstance(reply, WorkerMessage):
                self.bytes_received += reply.nbytes()
                try:
                    answers[i] = iter(self._accept(i, message, parts[i], reply))
                    continue
                except RefusedReplyError as error:
                    reply = Fault("refused", str(error)[:200])
            faults[i] = self.report(r, i, reply)
        self.monitor.record_exchange({i: faults.get(i) for i in messages}, self.bytes_sent, self.bytes_received)
        outcomes = []
        for group in groups:
            replied = {i: next(answers[i]) for i in sorted(group) if i in answers}
            outcomes.append(Outcome(replied, {i: faults[i] for i in group if i in faults}))
        return outcomes

    def report(self, r: int, i: int, fault: Fault) -> Fault:
        """Log a fault of node `i` in round r; return it with the node's name."""
        if fault.kind == "offline" and self.registry.is_removed(self.grid, i):
            fault = Fault("removed", "was removed")
        fault = replace(fault, node=self.registry.nodes[i].label)
        self.grid.log(f"round {r}: {fault}")
        return fault

    def note(self, sentence: str) -> None:
        """Log a sentence about the run, and keep it for the notes under the results."""
        self.grid.log(sentence)
        self.notes.append(f"{self.key['algorithm']}: {sentence}")

    def _accept(
        self, i: int, message: WorkerMessage, parts: Sequence[WorkerMessage], reply: WorkerMessage
    ) -> list[WorkerMessage]:
        """Check the reply to some messages in one; return its parts."""
        members, statistics = self.worker_clients[i].tolist(), self.context.initial_statistics
        replies = split_reply(reply, message, len(parts))
        for one, part in zip(replies, parts, strict=True):
            check_reply(one, part, members, self.example, self.context.federation, statistics)
        r, last, loaded = message.head["round"], max(message.head["last"]), reply.head.get("loaded")
        if loaded != last:
            start = f"continued from round {loaded}" if isinstance(loaded, int) and loaded else "started anew"
            self.note(f"round {r}: {self.registry.nodes[i].label} had lost its state, and its clients {start}")
        self.last[members] = r
        return replies


def count_rounds(groups: Sequence[Group]) -> int:
    """Count the different rounds."""
    return len({message.head["round"] for group in groups for message in group.values()})


class NodeBackend(RemoteBackend):
    """Run clients at the nodes of a federation, which keep their states and models.

    A message costs a node a process, so the evaluation of a round travels with the next training, and clients that
    exchange nothing train many rounds by one message.
    """

    def __init__(self, context: RunContext, make_payload: PayloadFactory, transport: NodeTransport) -> None:
        super().__init__(context, make_payload, transport)
        self._nodes, self._deployment, self.notes = transport, transport.registry.deployment, transport.notes
        merges, largest = transport.merges_clients, self._deployment.largest_update
        self.traits = BackendTraits(context.n_clients, is_deployed=True, merges_clients=merges, largest_update=largest)
        self._delivered = self.pending  # the clients whose pending answers the last messages carried
        self._late: tuple[int, Group] = 0, {}  # round and messages of the deferred evaluation
        self._late_scores: tuple[int, list[PointScores]] = 0, []
        # Clients that exchange nothing train many rounds per message: (kind, round) -> what became of it.
        shares = context.has_shared_parameters or self.statistics or context.replies_immediately
        extras = transport.example.extra or make_payload(context.all_ids[:1]).extra
        self._is_alone = not (shares or extras)
        self._ahead: dict[tuple[str, int], Outcome] = {}
        self._seconds_per_round: float | None = None

    @property
    def can_save(self) -> bool:  # type: ignore[override]
        return not self._ahead

    @property
    def evaluated_models(self) -> tuple[RowStack, RowStack]:
        return Params(), Params()  # they stay with the clients

    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        return [[] for _ in ids]  # nodes are only asked for what training and evaluation need

    def send(self, *groups: Group) -> list[Outcome]:
        """Send groups of messages, after the deferred evaluation if there is one."""
        self._delivered = self.pending.clone()
        (r, late), self._late = self._late, (0, {})
        if not late:
            return super().send(*groups)
        first, *outcomes = super().send(late, *groups)
        self._late_scores = r, self.merge_scores(first.replies)
        return outcomes

    def train(self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory) -> TrainReply:
        if not self._is_alone:
            return super().train(request, payload, make_payload)
        if ("train", request.round) not in self._ahead:
            self._train_ahead(request, make_payload)
        return self.read_training(request, payload, self._ahead.pop(("train", request.round)))

    def _train_ahead(self, request: TrainRequest, make_payload: PayloadFactory) -> None:
        """Let clients that exchange nothing train and evaluate for all rounds that fit into one message."""
        settings = self.context.settings
        last = min(request.round + self._count_rounds() - 1, settings.rounds)
        groups: dict[tuple[str, int], Group] = {}
        for r in range(request.round, last + 1):
            is_evaluated = settings.is_evaluated(r)
            more = TrainRequest.draw(self.context, r, update_server=request.update_server, should_evaluate=is_evaluated)
            groups["train", r] = self.make_training(more, make_payload(more.ids), make_payload)
            if is_evaluated:
                groups["evaluate", r] = self.make_evaluation(r, make_payload, None)
        outcomes = self.note_delivery(self._nodes.exchange(list(groups.values()), is_long=True))
        self._seconds_per_round = self._nodes.seconds / (last - request.round + 1)
        self._ahead = dict(zip(groups, outcomes, strict=True))

    def _count_rounds(self) -> int:
        """Count the rounds that take half of the time for a reply; one until a round's time is known."""
        if self._seconds_per_round is None:
            return 1
        fitting = self._deployment.round_timeout / 2 / max(1e-6, self._seconds_per_round)
        return max(1, min(MAX_ROUNDS_PER_MESSAGE, int(fitting)))

    def evaluate_received(self, r: int, make_payload: PayloadFactory, w: Params | None) -> list[PointScores]:
        if (outcome := self._ahead.pop(("evaluate", r), None)) is not None:  # they came with the training
            return self.merge_scores(outcome.replies)
        return super().evaluate_received(r, make_payload, w)

    def defer_evaluation(self, r: int, make_payload: PayloadFactory, w: Params | None) -> bool:
        """Let the next training carry the evaluation, since each message costs a node a process."""
        if not self._is_alone:
            self._late = r, self.make_evaluation(r, make_payload, w)
        return not self._is_alone

    def take_late_scores(self) -> tuple[int, list[PointScores]]:
        late, self._late_scores = self._late_scores, (0, [])
        return late

    def reject(self, r: int, faults: Mapping[int, Fault]) -> None:
        """Log the rejected uploads, and let their clients forget the round."""
        names, nodes = self.context.federation.names, []
        for client, fault in faults.items():
            self._nodes.grid.log(f"round {r}: client {names[client]!r} {fault}; its upload is dropped")
            # The client lacks the answers that came with the round that it is told to forget.
            self.pending[client] |= self._delivered[client]
            nodes += [i for i, members in enumerate(self.worker_clients) if client in members]
        self._nodes.forget(faults)
        self._nodes.monitor.record_dropped(nodes)

    def quarantine(self, r: int, clients: Iterable[int]) -> None:
        for client in sorted(clients):
            self._nodes.grid.log(
                f"round {r}: client {self.context.federation.names[client]!r} is quarantined from now on: its "
                "classes look like other classes of the others"
            )

    def global_buffers(self) -> Params | None:
        """Return the averaged statistics; None if some stay with the clients."""
        buffers = self.context.task.buffers
        local = {k for k, v in buffers.items() if v.is_floating_point()} - self.statistics.keys()
        return None if local or self.context.replies_immediately else Params({**buffers, **self.statistics})

    def state_tree(self) -> dict[str, Any]:
        """Return the server's share of the clients' state for a checkpoint; the rest is on their nodes."""
        return {
            **self.pending_tree(),
            "last": self._nodes.last,
            "wire": torch.tensor([self._nodes.bytes_sent, self._nodes.bytes_received]),
            "statistics": self.statistics,
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        self.load_pending_tree(tree)
        self._nodes.last, self.statistics = tree["last"], tree["statistics"]
        self._nodes.bytes_sent, self._nodes.bytes_received = tree["wire"].tolist()

    def load_fewer(self, flat: Mapping[str, Tensor], n_before: int, make_payload: PayloadFactory) -> None:
        """Load the state of a checkpoint with fewer clients; the others join now."""
        template = self.state_tree()
        leaves = {f"clients/{path}": leaf for path, leaf in flatten_tree(template).items()}
        per_client = {path: leaf for path, leaf in leaves.items() if path.split("/")[1] in PER_CLIENT and path in flat}
        longer = {path: torch.cat([flat[path], leaf[n_before:].to(flat[path])]) for path, leaf in per_client.items()}
        self.load_state_tree(restore_tree({"clients": template}, {**flat, **longer})["clients"])
        if self.sent is not None:
            ids = self.context.all_ids[n_before:]
            self.receive(ids, make_payload(ids))
