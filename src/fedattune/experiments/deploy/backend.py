"""The clients of a deployment, each at its node, for the round loop."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.effect import Effect
from ...core.params import Params
from ...training.backends.base import TrainReply
from ...training.backends.message import WorkerMessage
from ...training.backends.remote import RemoteBackend
from ...training.client_state import PayloadFactory
from ...training.context import RunContext
from .grid import NodeGrid
from .registration import NodeRegistry
from .reply_checks import RefusedReplyError, check_reply, drop_bad_uploads, make_expected_upload
from .state import LostStateError


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

    should_save_every_round = True

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
        # The round of each client's last accepted reply, (N,): the client continues from there.
        self._last = torch.zeros(context.n_clients, dtype=torch.int64)
        self._last_before = self._last  # before the last exchange
        self._delivered = self.pending  # the clients whose pending answers the last exchange carried
        self._numbers = itertools.count(1)
        self._expected_upload = make_expected_upload(context, self.personal_example, make_payload)
        self._round = 0  # of the last exchange
        self._usual_length: float | None = None
        self.bytes_sent = self.bytes_received = 0

    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        """Measure nothing: nodes are only asked for what training and evaluation need."""
        return [[] for _ in ids]

    def exchange(self, messages: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each node its message; return the valid replies, or the reasons why there is none."""
        nodes, numbers = self._registry.nodes, self._registry.locate(self._grid)
        r = self._round = next((message.head["round"] for message in messages.values()), 0)
        number = [self._registry.attempt, next(self._numbers)]
        self._last_before, self._delivered = self._last.clone(), self.pending.clone()
        for i, message in messages.items():
            message.head.update(
                self._key,
                number=number,
                last=self._last[self.worker_clients[i]].tolist(),
                clients=nodes[i].clients,
                n_clients=self.context.n_clients,
            )
        reachable = {numbers[i]: message for i, message in messages.items() if i in numbers}
        replies = self._grid.exchange(reachable, str(r))
        self.bytes_sent += sum(message.nbytes() for message in reachable.values())
        outcomes: dict[int, WorkerMessage | str] = {}
        for i, message in messages.items():
            if i not in numbers:
                outcomes[i] = f"{nodes[i].label} was offline"
                continue
            reply, reason, error = replies[numbers[i]]
            if reply is not None:
                outcomes[i] = self._accept(nodes[i].label, message, reply, self.worker_clients[i].tolist())
                continue
            outcomes[i] = f"{nodes[i].label} {reason}"
            if error == LostStateError.__name__ and self.sent is not None:
                self.pending[self.worker_clients[i]] = True  # send again what the node should have
        for one in outcomes.values():
            if isinstance(one, str):
                self._grid.log(f"round {r}: {one}")
        return outcomes

    def _accept(
        self, label: str, message: WorkerMessage, reply: WorkerMessage, members: Sequence[int]
    ) -> WorkerMessage | str:
        """Check a reply; return it, or the reason why it is refused."""
        self.bytes_received += reply.nbytes()
        try:
            check_reply(
                reply, message, members, self._expected_upload, self.context.federation, self.statistics
            )
        except RefusedReplyError as error:
            return f"{label} {str(error)[:200]}"
        r, last, loaded = message.head["round"], max(message.head["last"]), reply.head.get("loaded")
        if loaded != last:
            is_older = isinstance(loaded, int) and loaded
            start = f"continued from round {loaded}" if is_older else "started anew"
            sentence = f"round {r}: {label} had lost its state, and its clients {start}"
            self._grid.log(sentence)
            self.notes.append(f"{self._key['algorithm']}: {sentence}")
        self._last[members] = r
        return reply

    def check(self, reply: TrainReply) -> TrainReply:
        """Drop uploads that are not finite or far too large."""
        limit = self._registry.deployment.largest_update
        checked, self._usual_length = drop_bad_uploads(reply, limit, self._usual_length)
        names = self.context.federation.names
        for client, reason in checked.faults.items():
            if client not in reply.faults:
                self._grid.log(
                    f"round {self._round}: client {names[client]!r} {reason}; its upload is dropped"
                )
                # The client is told to forget this round, so it lacks the answers that came with it.
                self._last[client] = self._last_before[client]
                self.pending[client] |= self._delivered[client]
        return checked

    def global_buffers(self) -> Params | None:
        """Return the averaged statistics; None if some stay with the clients."""
        buffers = self.context.task.buffers
        local = {k for k, v in buffers.items() if v.is_floating_point()} - self.statistics.keys()
        return None if local or self.context.is_answered else Params({**buffers, **self.statistics})

    def state_tree(self) -> dict[str, Any]:
        """Return the server's share of the clients' state for a checkpoint; the rest is on their nodes."""
        usual = math.nan if self._usual_length is None else self._usual_length
        return {
            **self.pending_tree(),
            "last": self._last,
            "wire": torch.tensor([self.bytes_sent, self.bytes_received]),
            "usual": torch.tensor(usual, dtype=torch.float64),
            "statistics": self.statistics,
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Load the tree of a checkpoint."""
        self.load_pending_tree(tree)
        self._last, self.statistics, usual = tree["last"], tree["statistics"], float(tree["usual"])
        self.bytes_sent, self.bytes_received = tree["wire"].tolist()
        self._usual_length = None if math.isnan(usual) else usual
