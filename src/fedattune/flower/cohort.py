"""The clients of a real federation, each at its node, for the round loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core import Payload
from ..rounds import Run
from ..site import Report
from ..spread import Spread
from ..wire import Parcel
from .checks import RefusedError, check_answer, expected_upload, without_bad
from .meeting import Meeting
from .memory import LostMemoryError
from .nodes import Nodes


class FlowerCohort(Spread):
    """Clients at nodes; `key` names the run to them: token, algorithm, seed, and the model's fingerprint.

    Attributes:
        bytes_sent, bytes_got: of all tensors that travelled, those for evaluation among them.

    """

    pools_buffers = False
    commits_every_round = True

    def __init__(
        self, run: Run, nodes: Nodes, meeting: Meeting, key: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._meeting, self._nodes, self._key, self._say = meeting, nodes, dict(key), say
        super().__init__(run, [torch.tensor(sorted(site.clients.values())) for site in meeting.sites])
        self._met = torch.zeros(run.federation.n_clients, dtype=torch.bool)  # whose nodes should remember
        self._expected: Payload | None = None
        self._usual: float | None = None
        self.bytes_sent = self.bytes_got = 0

    def ask(self, parcels: Mapping[int, Parcel]) -> dict[int, Parcel | str]:
        """Send each site's node its parcel; the answers that can be taken, or why there is none."""
        sites = self._meeting.sites
        where = self._meeting.find(self._nodes)
        r = next((parcel.head["round"] for parcel in parcels.values()), 0)
        for site, parcel in parcels.items():
            parcel.head.update(
                self._key, clients=sites[site].clients, n_clients=self.run.federation.n_clients
            )
        reached = {where[site]: parcel for site, parcel in parcels.items() if site in where}
        answers = self._nodes.exchange(reached, str(r))
        self.bytes_sent += sum(parcel.nbytes() for parcel in reached.values())
        found: dict[int, Parcel | str] = {}
        for site, parcel in parcels.items():
            label = sites[site].label
            if site not in where:
                found[site] = f"{label} was offline"
                continue
            answer, why, _ = answers[where[site]]
            if answer is None:
                found[site] = f"{label} {why}"
                if LostMemoryError.__name__ in why:
                    self._send_again(site)
            else:
                found[site] = self._taken(label, parcel, answer, self.sites[site].tolist())
        for one in found.values():
            if isinstance(one, str):
                self._say(f"round {r}: {one}")
        return found

    def _taken(self, label: str, asked: Parcel, answer: Parcel, members: Sequence[int]) -> Parcel | str:
        """The answer, if it is one."""
        self.bytes_got += answer.nbytes()
        if self._expected is None:
            self._expected = expected_upload(self.run)
        try:
            check_answer(answer, asked, members, self._expected)
        except RefusedError as error:
            return f"{label} {error}"
        if answer.head.get("anew") is True and self._met[members].any():
            sentence = f"round {asked.head['round']}: {label} had lost its memory, and its clients began anew"
            self._say(sentence)
            self.run.said.append(f"{self._key['algorithm']}: {sentence}")
        self._met[members] = True
        return answer

    def _send_again(self, site: int) -> None:
        """Let a node that lost its memory be sent again what it is taken to hold."""
        if self.sent is not None:
            self.waiting[self.sites[site]] = self.first[self.sites[site]] = True

    def check(self, report: Report) -> Report:
        """The report without uploads that are not finite or far too large."""
        limit = self._meeting.deployment.largest_update
        found, self._usual = without_bad(report, limit, self._usual)
        names = self.run.federation.names
        for number, why in found.lost.items():
            if number not in report.lost:
                self._say(f"round {self._round}: client {names[number]!r} {why}; it is not taken")
        return found

    @property
    def _round(self) -> int:
        return self.run.record.round + 1

    def tree(self) -> dict[str, Any]:
        """What the server has of the clients; the rest is on their nodes."""
        sent = {} if self.sent is None else {"params": self.sent.params, "extra": self.sent.extra}
        return {
            "sent": sent,
            "waiting": self.waiting,
            "first": self.first,
            "met": self._met,
            "common": self.common,
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.waiting, self.first, self._met = tree["waiting"], tree["first"], tree["met"]
        self.common = tree["common"]
        if self.sent is not None:
            self.sent = Payload(tree["sent"]["params"], tree["sent"]["extra"])
