"""The clients of a deployment, each at its node, for the round loop."""

import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.effect import Effect
from ...core.io import flatten_tree
from ...core.params import Params
from ...core.payload import Payload
from ...runs.checkpoint import restore_tree
from ...runs.context import RunContext
from ...training.backends.base import BackendTraits, TrainReply, TrainRequest
from ...training.backends.message import FORMAT_VERSION, JOINED_FORMAT, WorkerMessage, join_messages
from ...training.backends.remote import RemoteBackend
from ...training.clients.evaluation import PointScores
from ...training.clients.state import PayloadFactory
from ..grid import MessageFormatError, NodeGrid, NodeReply
from ..node.state import LostStateError
from .registration import NodeRegistry
from .reply_checks import RefusedReplyError, check_reply, make_expected_upload, split_reply

MAX_ROUNDS_PER_MESSAGE = 100
"""Rounds of clients that exchange nothing in one message; if its reply is lost, they train these rounds again."""

PER_CLIENT = {"sent", "pending", "is_first", "pending_statistics", "last"}
"""Entries of the state that have one row per client."""

Outcomes = dict[int, WorkerMessage | str]
"""The reply of each node by its index, or the reason why there is none."""


class FlowerBackend(RemoteBackend):
    """Run clients at the nodes of a Flower grid.

    Args:
        context: the run.
        make_payload: returns what the server sends to clients.
        grid: the connection to the nodes.
        registry: the nodes of the federation.
        key: identifies the run in messages: token, algorithm, seed, and hash of the model.

    Attributes:
        bytes_sent, bytes_received: bytes of all tensors in messages, with those for evaluation.

    """

    @property
    def can_save(self) -> bool:  # type: ignore[override]
        """Tell whether the nodes stand at the server's round."""
        return not self._ahead

    def __init__(
        self,
        context: RunContext,
        make_payload: PayloadFactory,
        grid: NodeGrid,
        registry: NodeRegistry,
        key: Mapping[str, Any],
    ) -> None:
        self._registry, self._grid, self._key = registry, grid, dict(key)
        members = [torch.tensor(sorted(node.clients.values())) for node in registry.nodes]
        super().__init__(context, members, make_payload)
        self.traits = BackendTraits(
            context.n_clients, is_deployed=True, largest_update=registry.deployment.largest_update
        )
        # The round of each client's last accepted reply, (N,): the client continues from there.
        self._last = torch.zeros(context.n_clients, dtype=torch.int64)
        self._last_before = self._last  # before the last exchange
        self._delivered = self.pending  # the clients whose pending answers the last exchange carried
        self._numbers = itertools.count(1)
        self._expected_upload = make_expected_upload(context, self.personal_example, make_payload)
        self._late: tuple[int, dict[int, WorkerMessage]] = (
            0,
            {},
        )  # round and messages of the deferred evaluation
        self._late_scores: tuple[int, list[PointScores]] = 0, []
        # Clients that exchange nothing train many rounds per message: (kind, round) -> the outcome of each worker.
        shares = context.has_shared_parameters or self.statistics or context.replies_immediately
        extras = self._expected_upload.extra or make_payload(context.all_ids[:1]).extra
        self._is_alone = not (shares or extras)
        self._ahead: dict[tuple[str, int], Outcomes] = {}
        self._seconds_per_round: float | None = None
        self._missed: set[int] = set()  # workers that were waited for in vain
        self.bytes_sent = self.bytes_received = 0

    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        """Measure nothing: nodes are only asked for what training and evaluation need."""
        return [[] for _ in ids]

    def train(
        self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory
    ) -> TrainReply:
        """Train clients on their nodes; clients that exchange nothing train for many rounds at once."""
        if self._is_alone and ("train", request.round) not in self._ahead:
            self._train_ahead(request, make_payload)
        return super().train(request, payload, make_payload)

    def _train_ahead(self, request: TrainRequest, make_payload: PayloadFactory) -> None:
        """Let clients that exchange nothing train and evaluate for all rounds that fit into one message."""
        settings = self.context.settings
        last = min(request.round + self._count_rounds() - 1, settings.rounds)
        parts: dict[int, list[WorkerMessage]] = {}
        for r in range(request.round, last + 1):
            is_evaluated = r == settings.rounds or not r % settings.eval_every
            more = TrainRequest.draw(
                self.context, r, update_server=request.update_server, should_evaluate=is_evaluated
            )
            of_round = [self.make_training(more, make_payload(more.ids), make_payload)]
            of_round += [self.make_evaluation(r, make_payload, None)] if is_evaluated else []
            for i, message in (pair for messages in of_round for pair in messages.items()):
                parts.setdefault(i, []).append(message)
        self._wait_for(parts.keys())
        start = time.monotonic()
        outcomes = self._send(parts)
        self._seconds_per_round = (time.monotonic() - start) / (last - request.round + 1)
        # Many rounds hang on one message, so it gets a second chance; a node that has done them goes back first.
        done = {i: [one for one in replies if not isinstance(one, str)] for i, replies in outcomes.items()}
        lost = {i: parts[i][len(done[i]) :] for i in parts if len(done[i]) < len(parts[i])}
        if lost and last > request.round:
            self._wait_for(lost.keys())
            outcomes |= {i: [*done[i], *replies] for i, replies in self._send(lost).items()}
        for i, replies in outcomes.items():
            for part, reply in zip(parts[i], replies, strict=True):
                self._ahead.setdefault((part.head["kind"], part.head["round"]), {})[i] = reply

    def _count_rounds(self) -> int:
        """Count the rounds that take half of the time for a reply; one until a round's time is known."""
        if self._seconds_per_round is None:
            return 1
        fitting = self._registry.deployment.round_timeout / 2 / max(1e-6, self._seconds_per_round)
        return max(1, min(MAX_ROUNDS_PER_MESSAGE, int(fitting)))

    def _wait_for(self, workers: Collection[int]) -> None:
        """Wait once for each node that is offline, because it would miss many rounds."""
        end = time.monotonic() + self._registry.deployment.round_timeout
        while missing := set(workers) - self._registry.locate(self._grid).keys():
            if missing <= self._missed or time.monotonic() > end:
                break
            time.sleep(self._registry.deployment.poll)
        self._missed = missing

    def defer_evaluation(self, r: int, make_payload: PayloadFactory, w: Params | None) -> bool:
        """Let the next training carry the evaluation, since each message costs a node a process."""
        if not self._is_alone:
            self._late = r, self.make_evaluation(r, make_payload, w)
        return not self._is_alone

    def take_late_scores(self) -> tuple[int, list[PointScores]]:
        """Return the scores that came with the last training."""
        late, self._late_scores = self._late_scores, (0, [])
        return late

    def exchange(self, messages: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each node its message; return the valid replies, or the reasons why there is none."""
        head = next((message.head for message in messages.values()), None)
        if head and self._is_alone:
            return {
                i: reply
                for i, reply in self._ahead.pop((head["kind"], head["round"])).items()
                if i in messages
            }
        (r, late), self._late = self._late, (0, {})
        nodes = sorted(late.keys() | messages.keys())
        parts = {i: [group[i] for group in (late, messages) if i in group] for i in nodes}
        outcomes = self._send(parts)
        if late:
            first = {i: outcomes[i][0] for i in late}
            scored = {i: reply for i, reply in first.items() if not isinstance(reply, str)}
            self._late_scores = r, self.merge_scores(scored)
            for i in scored.keys() - messages.keys():
                self.pending[self.worker_clients[i]] = False
        return {i: outcomes[i][-1] for i in messages}

    def _send(self, parts: Mapping[int, Sequence[WorkerMessage]]) -> dict[int, list[WorkerMessage | str]]:
        """Send each node some messages; return for each message the valid reply, or the reason why there is none.

        They travel in one message, but to nodes of an older version of FedAttune one after the other.
        """
        self._last_before, self._delivered = self._last.clone(), self.pending.clone()
        apart = {i for i, some in parts.items() if len(some) > 1 and self._format(i) < JOINED_FORMAT}
        formats = {i: self._format(i) for i in parts}
        outcomes = self._send_joined({i: some for i, some in parts.items() if i not in apart})
        apart |= {i for i in outcomes if self._format(i) < formats[i]}  # put back to an older version
        outcomes.update((i, []) for i in apart)
        for turn in range(max((len(parts[i]) for i in apart), default=0)):
            rest = {i: parts[i][turn : turn + 1] for i in apart if turn < len(parts[i])}
            lost = {i for i in rest if outcomes[i] and isinstance(outcomes[i][-1], str)}
            for i, replies in self._send_joined(
                {i: some for i, some in rest.items() if i not in lost}
            ).items():
                outcomes[i] += replies
            for i in lost:  # what follows a lost message would begin too early
                outcomes[i].append(outcomes[i][-1])
        return outcomes

    def _send_joined(
        self, parts: Mapping[int, Sequence[WorkerMessage]]
    ) -> dict[int, list[WorkerMessage | str]]:
        """Send each node its messages in one."""
        nodes, numbers = self._registry.nodes, self._registry.locate(self._grid)
        number = [self._registry.attempt, next(self._numbers)]
        messages = {}
        for i, some in parts.items():
            for part in some:
                part.head.update(self._key)
            messages[i] = join_messages(some)
            messages[i].head.update(
                self._key,
                number=number,
                last=self._last[self.worker_clients[i]].tolist(),
                clients=nodes[i].clients,
                n_clients=self.context.n_clients,
            )
        r = max((message.head["round"] for message in messages.values()), default=0)
        reachable = {numbers[i]: message for i, message in messages.items() if i in numbers}
        formats = {numbers[i]: self._format(i) for i in messages if i in numbers}
        replies = self._grid.exchange(reachable, str(r), formats=formats)
        self.bytes_sent += sum(message.nbytes() for message in reachable.values())
        outcomes: dict[int, list[WorkerMessage | str]] = {}
        for i, message in messages.items():
            reply, reason, error = replies[numbers[i]] if i in numbers else NodeReply(None, "was offline")
            if reply is not None:
                members = self.worker_clients[i].tolist()
                outcomes[i] = self._accept(nodes[i].label, message, parts[i], reply, members)
            else:
                outcomes[i] = [f"{nodes[i].label} {reason}"] * len(parts[i])
            if error == LostStateError.__name__ and self.sent is not None:
                self.pending[self.worker_clients[i]] = True  # send again what the node should have
            if error == MessageFormatError.__name__:
                self._registry.take_for_old(i)
            if isinstance(sentence := outcomes[i][0], str):
                self._grid.log(f"round {r}: {sentence}")
        return outcomes

    def _format(self, i: int) -> int:
        """Return the newest version of the format that the node reads, and the server writes."""
        return min(self._registry.hellos[i].format, FORMAT_VERSION)

    def _accept(
        self,
        label: str,
        message: WorkerMessage,
        parts: Sequence[WorkerMessage],
        reply: WorkerMessage,
        members: Sequence[int],
    ) -> list[WorkerMessage | str]:
        """Check the reply to some messages in one; return its parts, or for each why the reply is refused."""
        self.bytes_received += reply.nbytes()
        try:
            replies = split_reply(reply, message, len(parts))
            for one, part in zip(replies, parts, strict=True):
                check_reply(
                    one, part, members, self._expected_upload, self.context.federation, self.statistics
                )
        except RefusedReplyError as error:
            return [f"{label} {str(error)[:200]}"] * len(parts)
        r, last, loaded = message.head["round"], max(message.head["last"]), reply.head.get("loaded")
        if loaded != last:
            is_older = isinstance(loaded, int) and loaded
            start = f"continued from round {loaded}" if is_older else "started anew"
            sentence = f"round {r}: {label} had lost its state, and its clients {start}"
            self._grid.log(sentence)
            self.notes.append(f"{self._key['algorithm']}: {sentence}")
        self._last[members] = r
        return [*replies]

    def refuse(self, r: int, reasons: Mapping[int, str]) -> None:
        """Log the refused uploads, and let their clients forget the round."""
        names = self.context.federation.names
        for client, reason in reasons.items():
            self._grid.log(f"round {r}: client {names[client]!r} {reason}; its upload is dropped")
            # The client lacks the answers that came with the round that it is told to forget.
            self._last[client] = self._last_before[client]
            self.pending[client] |= self._delivered[client]

    def quarantine(self, r: int, clients: Iterable[int]) -> None:
        """Log the clients in quarantine."""
        names = self.context.federation.names
        for client in sorted(clients):
            self._grid.log(
                f"round {r}: client {names[client]!r} shares with nobody from now on: its classes look like other "
                "classes of the others"
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
            "last": self._last,
            "wire": torch.tensor([self.bytes_sent, self.bytes_received]),
            "statistics": self.statistics,
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Load the tree of a checkpoint."""
        self.load_pending_tree(tree)
        self._last, self.statistics = tree["last"], tree["statistics"]
        self.bytes_sent, self.bytes_received = tree["wire"].tolist()

    def load_fewer(self, flat: Mapping[str, Tensor], n_before: int, make_payload: PayloadFactory) -> None:
        """Load the state of a checkpoint with fewer clients; the others join now."""
        template = self.state_tree()
        leaves = {f"clients/{path}": leaf for path, leaf in flatten_tree(template).items()}
        longer = {
            path: torch.cat([flat[path], leaf[n_before:].to(flat[path])])
            for path, leaf in leaves.items()
            if path.split("/")[1] in PER_CLIENT and path in flat
        }
        self.load_state_tree(restore_tree({"clients": template}, {**flat, **longer})["clients"])
        if self.sent is not None:
            ids = self.context.all_ids[n_before:]
            self.receive(ids, make_payload(ids))
