"""The backend of clients on remote workers: split each request by worker, send it, and merge the replies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.effect import Effect, Mechanism
from ...core.faults import Fault
from ...core.io import flatten_tree
from ...core.params import Params, concatenate, copy_dense
from ...core.payload import Payload, concatenate_payloads
from ...engine.base import EvalPart, Scores
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ..clients.evaluation import PointScores
from ..clients.state import PayloadFactory, put_payload_rows
from .base import Backend, BackendTraits, TrainReply, TrainRequest
from .message import WorkerMessage

Group = Mapping[int, WorkerMessage]
"""A message for each worker that it concerns, all of one kind and round."""


class Outcome(NamedTuple):
    """Outcome of a group: the replies by worker in order, and the faults of the workers without one."""

    replies: Mapping[int, WorkerMessage]
    faults: Mapping[int, Fault] = {}


class Transport(Protocol):
    """Carry messages to workers, such as the actors of a cluster or the nodes of a federation."""

    @property
    def worker_clients(self) -> Sequence[Tensor]:
        """The numbers of the clients of each worker, sorted."""

    def exchange(self, groups: Sequence[Group]) -> list[Outcome]:
        """Send groups of messages, in their order for each worker; return what became of each group."""


class RemoteBackend(Backend):
    """Run clients on remote workers. Split each request by worker, send it, and merge the replies.

    If the server answers uploads, this backend remembers the payload of each client: an answer waits here for the
    next message to the client's worker.

    Attributes:
        transport: carries the messages.
        worker_clients: the numbers of the clients of each worker, sorted.
        sent: the last payload of each client, if the server answers uploads.
        pending: (N,) bool, whether that payload still waits for a message.
        is_first: (N,) bool, whether a pending payload is the first one, from before the first round.
        pending_statistics: (N, ...) the averaged BatchNorm statistics that belong to it.
    """

    def __init__(self, context: RunContext, make_payload: PayloadFactory, transport: Transport) -> None:
        self.context, self.transport, self.notes = context, transport, []
        self.worker_clients = transport.worker_clients
        self.traits = BackendTraits(context.n_clients)
        self.statistics = context.initial_statistics
        self._personal_example = context.task.params.only(context.algorithm.personal.names(context.task.model))
        self._trained_scores: list[PointScores] = []
        self._evaluated_models: tuple[Params, Params] | None = None
        replies_immediately = context.replies_immediately
        # The first payloads go out with the first messages, and change nothing on a client that holds the same.
        self.pending = torch.full_like(context.all_ids, replies_immediately, dtype=torch.bool)
        self.is_first = self.pending.clone()
        self.pending_statistics = self.statistics.copies(context.n_clients) if replies_immediately else Params()
        self.sent = (
            make_payload(context.all_ids).map(lambda part: part.map(copy_dense)) if replies_immediately else None
        )

    def send(self, *groups: Group) -> list[Outcome]:
        return self.note_delivery(self.transport.exchange(groups))

    def note_delivery(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Take note which payloads have arrived, and which ones a worker has lost."""
        for outcome in outcomes:
            for worker in outcome.replies:
                self.pending[self.worker_clients[worker]] = False
            for worker, fault in outcome.faults.items():
                if fault.kind == "lost_state" and self.sent is not None:
                    self.pending[self.worker_clients[worker]] = True  # send again what it should have
        return outcomes

    @property
    def personal_example(self) -> Params:
        return self._personal_example

    @property
    def evaluated_models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers of the last evaluation at the evaluation point, from all workers."""
        if self._evaluated_models is None:
            self._evaluated_models = merge_models(self.send_to_evaluated(kind="models"))
        return self._evaluated_models

    def receive(self, ids: Tensor, payload: Payload) -> None:
        """Let the answers to clients `ids` wait for the next messages to their workers."""
        assert self.sent is not None
        put_payload_rows(self.sent, ids, payload)
        self.pending[ids], self.is_first[ids] = True, False
        if self.statistics:  # later rounds change them before these are sent
            self.pending_statistics.put_rows(ids, self.statistics.repeat(len(ids)))

    def train(self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory) -> TrainReply:
        self._evaluated_models = None
        (outcome,) = self.send(self.make_training(request, payload, make_payload))
        return self.read_training(request, payload, outcome)

    def make_training(
        self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory
    ) -> dict[int, WorkerMessage]:
        """Make the message to each worker that trains or evaluates clients; the arguments are those of `train`."""
        messages = {}
        ids, eval_ids = request.ids, self.context.eval_ids if request.should_evaluate else request.ids[:0]
        resting = eval_ids[~torch.isin(eval_ids, ids)]
        resting_payload = make_payload(resting) if payload is not None and len(resting) else None
        for worker, members in enumerate(self.worker_clients):
            training_rows, resting_rows = positions(ids, members), positions(resting, members)
            if not len(training_rows) and not bool(torch.isin(eval_ids, members).any()):
                continue
            message = messages[worker] = self.make_message(
                worker,
                kind="train",
                round=request.round,
                update_server=request.update_server,
                should_evaluate=request.should_evaluate,
                ids=ids[training_rows].tolist(),
                cohort=select_ids(request.cohort, members).tolist(),
                dropouts=select_ids(request.dropouts, members).tolist(),
                resting=resting[resting_rows].tolist(),
                replies_immediately=payload is None,
            )
            if payload is not None:
                message.put("sent", slice_payload(payload, training_rows, len(ids)))
            if resting_payload is not None and len(resting_rows):
                message.put("resting", slice_payload(resting_payload, resting_rows, len(resting)))
        return messages

    def evaluate_trained(self, make_payload: PayloadFactory) -> list[PointScores]:
        return self._trained_scores

    def evaluate_received(self, r: int, make_payload: PayloadFactory, w: Params | None) -> list[PointScores]:
        self._evaluated_models = None
        (outcome,) = self.send(self.make_evaluation(r, make_payload, w))
        return self.merge_scores(outcome.replies)

    def make_evaluation(self, r: int, make_payload: PayloadFactory, w: Params | None) -> dict[int, WorkerMessage]:
        """Make the message to each worker with evaluated clients; the arguments are those of `evaluate_received`."""
        context, mean = self.context, None
        if w is not None and context.task.buffers and (mean := self.global_buffers()) is None:
            w = None  # the buffers that it needs stay with the clients
        payload = None if context.replies_immediately else make_payload(context.eval_ids)
        head = {"kind": "evaluate", "round": r, "has_w": w is not None, "has_mean": mean is not None}
        messages = self._make_messages(context.eval_ids, payload, **head)
        for message in messages.values():
            for name, part in (("w", w), ("mean_buffers", mean)):
                if part is not None:
                    message.put(name, part)
        return messages

    def _make_messages(self, ids: Tensor, payload: Payload | None, **head: Any) -> dict[int, WorkerMessage]:
        """Make the message to each worker that has some of clients `ids`, with their rows of the payload."""
        messages = {}
        for worker, members in enumerate(self.worker_clients):
            if len(rows := positions(ids, members)):
                messages[worker] = self.make_message(worker, **head, replies_immediately=payload is None)
                if payload is not None:
                    messages[worker].put("sent", slice_payload(payload, rows, len(ids)))
        return messages

    def keep_models(self, ids: Tensor) -> None:
        self._evaluated_models = None
        messages = {}
        for worker, members in enumerate(self.worker_clients):
            if len(mine := select_ids(ids, members)):
                messages[worker] = self.make_message(worker, kind="keep", ids=mine.tolist())
        self.send(messages)

    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        """Let the workers measure their clients; a client whose worker does not answer has no effects."""
        payload = None if self.context.replies_immediately else make_payload(ids)
        messages = self._make_messages(ids, payload, kind="measure", round=r)
        for worker, message in messages.items():
            message.head["ids"] = select_ids(ids, self.worker_clients[worker]).tolist()
        measured: dict[int, list[Effect]] = {}
        for reply in self.send(messages)[0].replies.values():
            for client, effects in reply.head["effects"]:
                measured[client] = [Effect(Mechanism(*mechanism), value) for *mechanism, value in effects]
        return [measured.get(client, []) for client in ids.tolist()]

    def pending_tree(self) -> dict[str, Any]:
        return {
            "sent": {} if self.sent is None else self.sent._asdict(),
            "pending": self.pending,
            "is_first": self.is_first,
            "pending_statistics": self.pending_statistics,
        }

    def load_pending_tree(self, tree: Mapping[str, Any]) -> None:
        self.pending, self.is_first = tree["pending"], tree["is_first"]
        self.pending_statistics = tree["pending_statistics"]
        if self.sent is not None:
            self.sent = Payload(**tree["sent"])

    def state_tree(self) -> dict[str, Any]:
        """Return the state of all clients, as a checkpoint of a run in one process holds it."""
        replies = self._send_head(range(len(self.worker_clients)), {"kind": "state", "load": False})
        order = torch.cat(list(self.worker_clients)).argsort()
        joint = concatenate(_fill_states([reply.get("state") for reply in replies])).map(lambda v: v[order])
        tree: dict[str, Any] = {"local_state": {}, "memory": {}, "personal": Params(), "buffers": Params()}
        tree["kept"] = {"params": Params(), "buffers": Params(), "is_kept": joint["kept/is_kept"]}
        for name, rows in joint.items():
            part, _, rest = name.partition("/")
            if part in ("local_state", "memory", "kept") and "/" in rest:
                key, _, tensor = rest.partition("/")
                tree[part].setdefault(key, Params())[tensor] = rows
            elif part not in ("fresh", "kept"):
                tree[part][rest] = rows
        sent = self.pending_tree()["sent"]
        return {**tree, "sent": sent, "fresh": joint["fresh"], "statistics": self.statistics}

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        self.statistics, fresh = tree["statistics"], tree["fresh"]
        if self.sent is not None:
            self.sent = Payload(**tree["sent"])
            self.pending, self.is_first = torch.ones_like(fresh), ~fresh
        state = Params(
            flatten_tree({key: tree[key] for key in ("local_state", "memory", "personal", "buffers", "fresh", "kept")})
        )
        messages = {}
        for worker, members in enumerate(self.worker_clients):
            messages[worker] = self.make_message(worker, kind="state", load=True)
            messages[worker].put("state", state.rows(members))
        self.send(messages)

    def global_buffers(self) -> Params | None:
        """Return the buffers with which the global model is scored: the mean over evaluated clients."""
        totals = [reply.get("total") for reply in self.send_to_evaluated(kind="buffers")]
        return sum(totals[1:], totals[0]) / len(self.context.eval_ids)

    def make_message(self, worker: int, **head: Any) -> WorkerMessage:
        """Make a message to a worker, with the statistics and the payloads that are pending."""
        message, members = WorkerMessage(head), self.worker_clients[worker]
        message.put("statistics", self.statistics)
        pending = members[self.pending[members]]
        if self.sent is not None and len(pending):
            head["pending"], head["pending_first"] = pending.tolist(), self.is_first[pending].tolist()
            message.put("pending", self.sent.rows(pending))
            message.put("pending_statistics", self.pending_statistics.rows(pending))
        return message

    def send_to_evaluated(self, **head: Any) -> list[WorkerMessage]:
        eval_ids, members = self.context.eval_ids, self.worker_clients
        return self._send_head([w for w, ids in enumerate(members) if bool(torch.isin(eval_ids, ids).any())], head)

    def _send_head(self, workers: Iterable[int], head: Mapping[str, Any]) -> list[WorkerMessage]:
        (outcome,) = self.send({w: self.make_message(w, **head) for w in workers})
        return list(outcome.replies.values())

    def merge_scores(self, replies: Mapping[int, WorkerMessage]) -> list[PointScores]:
        return merge_scores((reply.scores() for reply in replies.values()), self.context.device)

    def read_training(self, request: TrainRequest, payload: Payload | None, outcome: Outcome) -> TrainReply:
        """Merge the replies of all workers to a request to train, uploads sorted by client."""
        self._trained_scores = self.merge_scores(outcome.replies)
        faults: dict[int, Fault] = {}
        for worker, fault in outcome.faults.items():
            lost = select_ids(select_ids(request.cohort, self.worker_clients[worker]), request.ids)
            faults |= dict.fromkeys(lost[~torch.isin(lost, request.dropouts)].tolist(), fault)
        heads = [reply.head for reply in outcome.replies.values()]
        ids = torch.tensor([i for head in heads for i in head["ids"]], dtype=torch.int64)
        ids, rows = ids.to(self.context.device).sort()
        if payload is None:
            assert self.sent is not None
            sent = self.sent.rows(ids)
        else:
            sent = slice_payload(payload, torch.searchsorted(request.ids, ids), len(request.ids))
        full = [reply for reply in outcome.replies.values() if reply.head["ids"]]
        upload, buffers = Payload(Params()), Params()
        if full:
            upload = concatenate_payloads([reply.payload("upload") for reply in full])
            buffers = concatenate([reply.get("buffers") for reply in full])
        if len(full) > 1:  # one worker's clients are in order
            upload, buffers = upload.rows(rows), buffers.rows(rows)
        return TrainReply(
            ids,
            sent,
            upload,
            buffers,
            sum(head["n_trained"] for head in heads),
            sum(head["steps"] for head in heads),
            sorted(i for head in heads for i in head["diverged"]),
            faults,
            *(sorted(i for head in heads for i in head.get(key, ())) for key in ("refused", "alone")),
        )


def _fill_states(states: Sequence[Params]) -> list[Params]:
    """Give all states the same tensors: a worker without a judged client keeps no models."""
    shapes = {name: v for state in states for name, v in state.items()}
    return [
        Params({k: s.get(k, v.new_zeros(len(s["fresh"]), *v.shape[1:])) for k, v in shapes.items()}) for s in states
    ]


def merge_scores(worker_scores: Iterable[Sequence[PointScores]], device: torch.device) -> list[PointScores]:
    """Merge the scores of all workers, sorted by client.

    A client that has no samples of a part, on a worker that scores no such part, counts with none.
    """
    pieces = [list(scores) for scores in worker_scores if scores]
    keys = dict.fromkeys((one.point, one.part) for piece in pieces for one in piece)
    merged_scores = []
    for point, part in keys:
        some = [_find_scores(piece, point, part) for piece in pieces]
        some = [one for one in some if len(one.ids)]
        ids, rows = torch.cat([one.ids for one in some]).to(device).sort()
        columns = zip(*(one.scores for one in some), strict=True)
        merged_scores.append(PointScores(point, part, ids, Scores(*(torch.cat(column)[rows] for column in columns))))
    return merged_scores


def _find_scores(piece: Sequence[PointScores], point: str, part: EvalPart) -> PointScores:
    """Return the scores of one worker at one point on one part, zeros if it has none."""
    for one in piece:
        if (one.point, one.part) == (point, part):
            return one
    same = next((one for one in piece if one.point == point), None)
    ids = piece[0].ids[:0] if same is None else same.ids
    zeros = torch.zeros(len(ids), device=piece[0].scores.n.device)
    return PointScores(point, part, ids, Scores(zeros.long(), zeros.long(), zeros.double()))


def merge_models(replies: Sequence[WorkerMessage]) -> tuple[Params, Params]:
    """Merge the models and buffers of all actors, sorted by client; one model for all clients stays one."""
    full = [reply for reply in replies if reply.get("params")]
    if len(full) < len(replies):
        return Params(), Params()  # nothing was evaluated yet
    order = torch.tensor([i for reply in full for i in reply.head["ids"]]).argsort()

    def merge(name: str) -> Params:
        pieces = [reply.get(name) for reply in full]
        return Params({k: _merge_tensor([piece[k] for piece in pieces], order) for k in pieces[0]})

    return merge("params"), merge("buffers")


def _merge_tensor(pieces: list[Tensor], order: Tensor) -> Tensor:
    one = pieces[0][:1]
    if all((len(v) == 1 or v.stride(0) == 0) and torch.equal(v[:1], one) for v in pieces):
        return one.expand(len(order), *one.shape[1:])
    return torch.cat(pieces)[order.to(one.device)]


def positions(ids: Tensor, members: Tensor) -> Tensor:
    """Return the positions in `ids` of the clients that are among `members`."""
    return torch.isin(ids, members).nonzero().flatten()


def select_ids(ids: Tensor, members: Tensor) -> Tensor:
    """Return the clients of `ids` that are among `members`."""
    return ids[torch.isin(ids, members)]


def slice_payload(payload: Payload, rows: Tensor, n: int) -> Payload:
    """Return some rows of a payload of n; a model that is the same for all stays one."""
    if len(rows) == n:
        return payload

    def select(params: Params) -> Params:
        return params.map(
            lambda v: v[:1].expand(len(rows), *v.shape[1:]) if v.stride(0) == 0 else v.index_select(0, rows)
        )

    return payload.map(select)
