"""Clients at several sites elsewhere: what each is sent, and what comes back, put together for the round loop.

Payloads taken apart for sites elsewhere, and what comes back put together.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.io import flatten_tree
from ...core.params import Params, concatenate
from ...core.payload import Payload, concatenate_payloads
from ..client_state import Sender, copy_rows
from ..engine import EvalPart, Scores
from ..evaluation import PointScores
from ..storage.rows import RowStack
from .base import Backend, TrainReply, TrainRequest
from .message import WorkerMessage

if TYPE_CHECKING:
    from ..loop import RoundLoop


def merge_scores(found: Iterable[Sequence[PointScores]], where: torch.device) -> list[PointScores]:
    """The scores of all sites, clients sorted; who has no samples of a part that others have counts with none."""
    pieces = [list(scored) for scored in found if scored]
    keys = dict.fromkeys((one.point, one.part) for piece in pieces for one in piece)
    merged = []
    for point, part in keys:
        some = [_find_scores(piece, point, part) for piece in pieces]
        some = [one for one in some if len(one.ids)]
        ids, rows = torch.cat([one.ids for one in some]).to(where).sort()
        scores = Scores(
            *(torch.cat(column)[rows] for column in zip(*(one.scores for one in some), strict=True))
        )
        merged.append(PointScores(point, part, ids, scores))
    return merged


def _find_scores(piece: Sequence[PointScores], point: str, part: EvalPart) -> PointScores:
    """The scores of one site at one point on one part."""
    for one in piece:
        if (one.point, one.part) == (point, part):
            return one
    same = next((one for one in piece if one.point == point), None)
    ids = piece[0].ids[:0] if same is None else same.ids
    zeros = torch.zeros(len(ids), device=piece[0].scores.n.device)
    return PointScores(point, part, ids, Scores(zeros.long(), zeros.long(), zeros.double()))


def positions(ids: Tensor, members: Tensor) -> Tensor:
    """The places in `ids` of those that are at a site."""
    return torch.isin(ids, members).nonzero().flatten()


def slice_payload(payload: Payload, rows: Tensor, n: int) -> Payload:
    """Some rows of a payload of n; a model that is the same for all stays one."""
    if len(rows) == n:
        return payload

    def some(params: Params) -> Params:
        return params.map(
            lambda v: v[:1].expand(len(rows), *v.shape[1:]) if v.stride(0) == 0 else v.index_select(0, rows)
        )

    return Payload(some(payload.params), {k: some(v) for k, v in payload.extra.items()})


class RemoteBackend(Backend):
    """Clients at sites behind a network; `sites` are the numbers of the clients at each, sorted.

    Where the server answers uploads, it remembers what each client was sent: answers wait here for the next
    parcel to the client's site.
    """

    def __init__(self, run: "RoundLoop", sites: Sequence[Tensor]) -> None:
        self.run, self.sites = run, sites
        self.at_once = run.federation.n_clients
        averaged = run.task.bn_statistics if run.averages_buffers else ()
        self.common = run.task.buffers.only(averaged)
        self._personal = run.task.params.only(run.algorithm.personal.names(run.task.model))
        self._scored: list[PointScores] = []
        everyone = run.everyone
        # The first payloads go out with the first parcels, and change nothing on a client that holds the same.
        self.waiting = torch.full_like(everyone, run.answers, dtype=torch.bool)
        self.first = self.waiting.clone()
        self.then_common = self.common.copies(len(everyone)) if run.answers else Params()
        self.sent: Payload | None = None
        if run.answers:
            first = run.send(everyone)
            self.sent = Payload(copy_rows(first.params), {k: copy_rows(v) for k, v in first.extra.items()})

    @abstractmethod
    def ask(self, parcels: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each site its parcel; the replies, or why there is none."""

    @property
    def personal(self) -> Params:
        """The tensors that never leave a client, of one client."""
        return self._personal

    @property
    def deployed(self) -> tuple[RowStack, RowStack]:
        """Models and buffers stay with the clients."""
        return Params(), Params()

    def check(self, report: TrainReply) -> TrainReply:
        """The report without uploads that cannot be taken; sites are trusted unless this says otherwise."""
        return report

    def arrived(self, ids: Tensor, payload: Payload) -> None:
        """Let answers to clients `ids` wait for the next parcels to their sites."""
        assert self.sent is not None
        self.sent.params.put_rows(ids, payload.params)
        for key, part in self.sent.extra.items():
            part.put_rows(ids, payload.extra[key])
        self.waiting[ids], self.first[ids] = True, False
        if self.common:  # later rounds change it before these are sent
            self.then_common.put_rows(ids, self.common.repeat(len(ids)))

    def train(self, order: TrainRequest, payload: Payload | None, send: Sender) -> TrainReply:
        """Train clients at their sites, all at the same time."""
        parcels = {}
        judged = self.run.judged if order.evaluate else order.ids[:0]
        others = judged[~torch.isin(judged, order.ids)]
        resting = send(others) if payload is not None and len(others) else None
        for site, members in enumerate(self.sites):
            mine, rest = positions(order.ids, members), positions(others, members)
            if not len(mine) and not bool(torch.isin(judged, members).any()):
                continue
            head = {
                "kind": "train",
                "round": order.round,
                "learns": order.learns,
                "evaluate": order.evaluate,
                "ids": order.ids[mine].tolist(),
                "asked": order.asked[positions(order.asked, members)].tolist(),
                "away": order.away[positions(order.away, members)].tolist(),
                "others": others[rest].tolist(),
                "kept": payload is None,
            }
            parcel = parcels[site] = self._parcel(head, members)
            if payload is not None:
                parcel.put("sent", slice_payload(payload, mine, len(order.ids)))
            if resting is not None and len(rest):
                parcel.put("others", slice_payload(resting, rest, len(others)))
        replies, lost = self._ask(parcels)
        gone_for: dict[int, str] = {}
        for site, why in lost.items():
            members = self.sites[site]
            gone = order.asked[positions(order.asked, members)]
            gone = gone[torch.isin(gone, order.ids) & ~torch.isin(gone, order.away)]
            gone_for |= dict.fromkeys(gone.tolist(), why)
        self._scored = merge_scores((reply.scores() for reply in replies.values()), self.run.everyone.device)
        return self.check(self._report(order, payload, list(replies.values()), gone_for))

    def trained(self, r: int, send: Sender) -> list[PointScores]:
        """The scores after the local training of round r, which came with the uploads."""
        return self._scored

    def received(self, r: int, send: Sender, w: Params | None) -> list[PointScores]:
        """The scores after the communication of round r, and those of the global model w, if there is one."""
        run = self.run
        mean = None
        if w is not None and run.task.buffers and (mean := self.global_buffers()) is None:
            w = None  # what it needs stays with the clients
        parcels = {}
        payload = None if run.answers else send(run.judged)
        for site, members in enumerate(self.sites):
            rows = positions(run.judged, members)
            if not len(rows):
                continue
            head = {
                "kind": "evaluate",
                "round": r,
                "kept": payload is None,
                "has_w": w is not None,
                "has_mean": mean is not None,
            }
            parcel = parcels[site] = self._parcel(head, members)
            if payload is not None:
                parcel.put("sent", slice_payload(payload, rows, len(run.judged)))
            if w is not None:
                parcel.put("w", w)
            if mean is not None:
                parcel.put("mean_buffers", mean)
        replies, _ = self._ask(parcels)
        return merge_scores((reply.scores() for reply in replies.values()), self.run.everyone.device)

    def waiting_tree(self) -> dict[str, Any]:
        """What clients were sent, and which answers wait for them."""
        sent = {} if self.sent is None else {"params": self.sent.params, "extra": self.sent.extra}
        return {"sent": sent, "waiting": self.waiting, "first": self.first, "then_common": self.then_common}

    def load_waiting(self, tree: Mapping[str, Any]) -> None:
        """Take over what `waiting_tree` gave."""
        self.waiting, self.first, self.then_common = tree["waiting"], tree["first"], tree["then_common"]
        if self.sent is not None:
            self.sent = Payload(tree["sent"]["params"], tree["sent"]["extra"])

    def tree(self) -> dict[str, Any]:
        """What lives on all clients, as a checkpoint of a run in one process holds it."""
        replies, _ = self._ask(
            {
                s: self._parcel({"kind": "state", "load": False}, members)
                for s, members in enumerate(self.sites)
            }
        )
        order = torch.cat(list(self.sites)).argsort()
        states = [reply.get("state") for reply in replies.values()]
        joint = concatenate(states).map(lambda v: v[order])
        tree: dict[str, Any] = {"memory": {}, "personal": Params(), "buffers": Params()}
        for name, rows in joint.items():
            part, _, rest = name.partition("/")
            if part == "memory":
                key, _, tensor = rest.partition("/")
                tree["memory"].setdefault(key, Params())[tensor] = rows
            elif part != "fresh":
                tree[part][rest] = rows
        sent = self.waiting_tree()["sent"]
        return {**tree, "sent": sent, "fresh": joint["fresh"], "common": self.common}

    def load(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds, and hand it to the sites."""
        self.common, fresh = tree["common"], tree["fresh"]
        if self.sent is not None:
            self.sent = Payload(tree["sent"]["params"], tree["sent"]["extra"])
            self.waiting, self.first = torch.ones_like(fresh), ~fresh
        state = Params(flatten_tree({key: tree[key] for key in ("memory", "personal", "buffers", "fresh")}))
        parcels = {}
        for site, members in enumerate(self.sites):
            parcels[site] = self._parcel({"kind": "state", "load": True}, members)
            parcels[site].put("state", state.rows(members))
        self._ask(parcels)

    def global_buffers(self) -> Params | None:
        """The buffers with which the global model is scored: the mean of those of the evaluated clients."""
        judged = self.run.judged
        sites = [s for s, members in enumerate(self.sites) if bool(torch.isin(judged, members).any())]
        replies, _ = self._ask({s: self._parcel({"kind": "buffers"}, self.sites[s]) for s in sites})
        totals = [reply.get("total") for reply in replies.values()]
        return sum(totals[1:], totals[0]) / len(judged)

    def _parcel(self, head: dict[str, Any], members: Tensor) -> WorkerMessage:
        """A parcel with what waits for a site."""
        parcel = WorkerMessage(head)
        parcel.put("common", self.common)
        waiting = members[self.waiting[members]]
        if self.sent is not None and len(waiting):
            head["held"], head["first"] = waiting.tolist(), self.first[waiting].tolist()
            parcel.put("held", self.sent.rows(waiting))
            parcel.put("then_common", self.then_common.rows(waiting))
        return parcel

    def _ask(self, parcels: Mapping[int, WorkerMessage]) -> tuple[dict[int, WorkerMessage], dict[int, str]]:
        """The replies of sites in order, and why others gave none."""
        found = self.ask(parcels)
        replies = {s: found[s] for s in sorted(found)}
        good = {s: reply for s, reply in replies.items() if isinstance(reply, WorkerMessage)}
        for site in good:
            self.waiting[self.sites[site]] = False
        return good, {s: reply for s, reply in replies.items() if isinstance(reply, str)}

    def _report(
        self,
        order: TrainRequest,
        payload: Payload | None,
        replies: Sequence[WorkerMessage],
        lost: Mapping[int, str],
    ) -> TrainReply:
        """One report of those of all sites, uploads sorted by client."""
        where = self.run.everyone.device
        ids = torch.tensor([i for reply in replies for i in reply.head["ids"]], dtype=torch.int64)
        ids, rows = ids.to(where).sort()
        if payload is None:
            assert self.sent is not None
            sent = self.sent.rows(ids)
        else:
            sent = slice_payload(payload, torch.searchsorted(order.ids, ids), len(order.ids))
        full = [reply for reply in replies if reply.head["ids"]]
        upload, buffers = Payload(Params()), Params()
        if full:
            upload = concatenate_payloads([reply.payload("upload") for reply in full]).rows(rows)
            buffers = concatenate([reply.get("buffers") for reply in full]).rows(rows)
        return TrainReply(
            ids,
            sent,
            upload,
            buffers,
            sum(reply.head["n_trained"] for reply in replies),
            sum(reply.head["steps"] for reply in replies),
            sorted(i for reply in replies for i in reply.head["dropped"]),
            lost,
        )
