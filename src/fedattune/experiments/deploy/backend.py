"""The clients of a real federation, each at its node, for the round loop."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...core.params import Params
from ...training.backends.base import TrainReply
from ...training.backends.message import WorkerMessage
from ...training.backends.remote import RemoteBackend
from ...training.client_state import Sender
from ...training.context import RunContext
from .grid import NodeGrid
from .registration import NodeRegistry
from .reply_checks import RefusedReplyError, check_reply, drop_bad_uploads, make_expected_upload
from .state import LostStateError


class FlowerBackend(RemoteBackend):
    """Clients at nodes; `key` names the run to them: token, algorithm, seed, and the model's fingerprint.

    Attributes:
        bytes_sent, bytes_got: of all tensors that travelled, those for evaluation among them.

    """

    saves_every_round = True

    def __init__(
        self,
        context: RunContext,
        send: Sender,
        nodes: NodeGrid,
        meeting: NodeRegistry,
        key: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._meeting, self._nodes, self._key, self._say = meeting, nodes, dict(key), say
        super().__init__(
            context, [torch.tensor(sorted(site.clients.values())) for site in meeting.sites], send
        )
        # Per client, the round of which its node's last answer was taken: from there it goes on.
        self._last = torch.zeros(context.n_clients, dtype=torch.int64)
        self._before = self._last  # of the exchange that was last, and whose answers went with it
        self._delivered = self.pending
        self._messages = itertools.count(1)
        self._expected = make_expected_upload(context, self.personal, send)
        self._round = 0
        self._usual: float | None = None
        self.bytes_sent = self.bytes_got = 0

    def exchange(self, parcels: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each site's node its parcel; the answers that can be taken, or why there is none."""
        sites = self._meeting.sites
        where = self._meeting.find(self._nodes)
        r = self._round = next((parcel.head["round"] for parcel in parcels.values()), 0)
        number, self._before, self._delivered = next(self._messages), self._last.clone(), self.pending.clone()
        for site, parcel in parcels.items():
            parcel.head.update(
                self._key,
                number=[self._meeting.attempt, number],
                last=self._last[self.workers[site]].tolist(),
                clients=sites[site].clients,
                n_clients=self.context.n_clients,
            )
        reached = {where[site]: parcel for site, parcel in parcels.items() if site in where}
        answers = self._nodes.exchange(reached, str(r))
        self.bytes_sent += sum(parcel.nbytes() for parcel in reached.values())
        found: dict[int, WorkerMessage | str] = {}
        for site, parcel in parcels.items():
            label = sites[site].label
            if site not in where:
                found[site] = f"{label} was offline"
                continue
            answer, why, error = answers[where[site]]
            if answer is None:
                found[site] = f"{label} {why}"
                if error == LostStateError.__name__ and self.sent is not None:
                    self.pending[self.workers[site]] = True  # it is sent again what it is taken to hold
            else:
                found[site] = self._taken(label, parcel, answer, self.workers[site].tolist())
        for one in found.values():
            if isinstance(one, str):
                self._say(f"round {r}: {one}")
        return found

    def _taken(
        self, label: str, asked: WorkerMessage, answer: WorkerMessage, members: Sequence[int]
    ) -> WorkerMessage | str:
        """The answer, if it is one."""
        self.bytes_got += answer.nbytes()
        try:
            check_reply(answer, asked, members, self._expected, self.context.federation, self.statistics)
        except RefusedReplyError as error:
            return f"{label} {str(error)[:200]}"
        last, remembered = max(asked.head["last"]), answer.head.get("remembered")
        if remembered != last:
            began = (
                f"went on from round {remembered}"
                if isinstance(remembered, int) and remembered
                else "began anew"
            )
            sentence = f"round {asked.head['round']}: {label} had lost its memory, and its clients {began}"
            self._say(sentence)
            self.notes.append(f"{self._key['algorithm']}: {sentence}")
        self._last[members] = asked.head["round"]
        return answer

    def check(self, report: TrainReply) -> TrainReply:
        """The report without uploads that are not finite or far too large."""
        limit = self._meeting.deployment.largest_update
        found, self._usual = drop_bad_uploads(report, limit, self._usual)
        names = self.context.federation.names
        for number, why in found.faults.items():
            if number not in report.faults:
                self._say(f"round {self._round}: client {names[number]!r} {why}; it is not taken")
                # It is told to forget this round, and then lacks what came with it.
                self._last[number] = self._before[number]
                self.pending[number] |= self._delivered[number]
        return found

    def global_buffers(self) -> Params | None:
        """The statistics that the server knows, where they are averaged; the others stay with the clients."""
        buffers = self.context.task.buffers
        own = {k for k, v in buffers.items() if v.is_floating_point()} - self.statistics.keys()
        if own or self.context.is_answered:
            return None
        return Params({**buffers, **self.statistics})

    def state_tree(self) -> dict[str, Any]:
        """What the server has of the clients; the rest is on their nodes."""
        wire = torch.tensor([self.bytes_sent, self.bytes_got])
        usual = torch.tensor(float("nan") if self._usual is None else self._usual, dtype=torch.float64)
        return {
            **self.pending_tree(),
            "last": self._last,
            "wire": wire,
            "usual": usual,
            "statistics": self.statistics,
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.load_pending_tree(tree)
        self._last, self.statistics, usual = tree["last"], tree["statistics"], float(tree["usual"])
        self.bytes_sent, self.bytes_got = tree["wire"].tolist()
        self._usual = None if math.isnan(usual) else usual
