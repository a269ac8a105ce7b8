"""Where a round is evaluated: trained (after local training), received (after communication), and the global model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..client import SGD
from ..core.algorithm import Algorithm, FineTune
from ..core.params import Params, concatenate
from ..core.payload import Payload
from ..data import Federation
from .client_state import ClientStates, Sender
from .engine import ClientInputs, ClientOutputs, Engine, EvalPart, LocalTraining, Scores
from .storage.rows import RowStack, RowStorage

PROBE_CHUNK = 32
"""Clients whose received models are made together where that takes a look at data."""


MODEL_CHUNK_BYTES = 1 << 30
"""Bytes of personal models that are made and evaluated together."""


EVALUATED_PARTS: tuple[EvalPart, ...] = ("test", "validation")


class ClientModels(NamedTuple):
    """Models and buffers (E, ...) of some clients (E,), sorted."""

    ids: Tensor
    params: Params
    buffers: Params


class PointScores(NamedTuple):
    """The scores (E,) on one part of clients `ids` (E,), at one point: received, trained, or global.

    At `global`, it is the one global model of the method that is scored on every client's part.
    """

    point: str
    part: EvalPart
    ids: Tensor
    scores: Scores


@dataclass
class LocalEvaluation:
    """Evaluates clients at the two points and keeps the models that it evaluated last.

    Attributes:
        eval_ids: the E clients that are evaluated, sorted.
        headline_models: models and buffers (E, ...) that were evaluated last at the headline point.

    """

    algorithm: Algorithm
    engine: Engine
    federation: Federation
    clients: ClientStates
    eval_ids: Tensor
    headline_models: tuple[RowStack, RowStack] = field(default_factory=lambda: (Params(), Params()))

    def select_trained(self, ids: Tensor, trained: ClientOutputs) -> ClientModels | None:
        """The models of those clients `ids` that are evaluated, after local training; None if there are none."""
        if self.algorithm.adapt:
            return None  # then `trained` is the received model after fine-tuning
        if not torch.equal(ids, self.eval_ids):
            rows = torch.isin(ids, self.eval_ids, assume_unique=True).nonzero().flatten()
            ids, trained = ids[rows], trained.rows(rows)
        if not len(ids):
            return None
        return ClientModels(
            ids,
            vmap(self.algorithm.client.trained_model)(trained.upload, trained.local_state),
            trained.buffers,
        )

    def evaluate_trained(self, done: Sequence[ClientModels], send: Sender) -> list[PointScores]:
        """The scores of clients after local training: of the models that `done` has, those of the others rest."""
        if self.algorithm.adapt:
            return []

        def models(ids: Tensor) -> ClientModels:
            if len(done) == 1 and torch.equal(done[0].ids, ids):
                return done[0]
            pieces = [_select_clients(mine, ids) for mine in done]
            busy = torch.cat([mine.ids for mine in pieces]) if pieces else ids[:0]
            if len(resting := ids[~torch.isin(ids, busy)]):
                params = self.clients.models(self.algorithm.client.resting_model, resting, send)
                pieces.append(ClientModels(resting, params, self.clients.held_buffers(resting)))
            params, buffers = (
                like.map(lambda v: v.new_empty(len(ids), *v.shape[1:]))
                for like in (pieces[0].params, pieces[0].buffers)
            )
            for mine in pieces:
                places = torch.searchsorted(ids, mine.ids)
                params.put_rows(places, mine.params)
                buffers.put_rows(places, mine.buffers)
            return ClientModels(ids, params, buffers)

        return self._score("trained", map(models, self._stretches()))

    def evaluate_received(
        self,
        send: Sender,
        w: Params | None,
        training: LocalTraining,
        adaptation: LocalTraining,
        mean_buffers: Params | None,
    ) -> list[PointScores]:
        """The scores of clients after communication; then fine-tuned, where the method does that.

        `w` is the global model without what never leaves a client, if there is one; its buffers are `mean_buffers`,
        by default the mean of those that clients have here. `training` is the work of the next round, `adaptation`
        that of this round's fine-tuning.
        """
        adapt, rule = self.algorithm.adapt, self.algorithm.client

        def models(ids: Tensor) -> ClientModels:
            buffers = self.clients.received_buffers(ids)
            if rule.is_ready_after_probe:
                return ClientModels(ids, self._probed(send, training, ids, buffers), buffers)
            params = self.clients.models(rule.received_model, ids, send)
            return ClientModels(ids, params, buffers)

        stretches = whole = self._stretches()
        if (
            len(stretches) > 1
            and not rule.is_ready_after_probe
            and _is_one_model(models(self.eval_ids[:2]).params)
        ):
            whole = [self.eval_ids]  # one model for all takes no memory
        made = [models(self.eval_ids)] if len(whole) == 1 else []
        found = self._score("received", made or map(models, whole))
        found += self._global(w, found, mean_buffers, bool(made) and _is_one_model(made[0].params))
        if adapt:
            # Whoever adapts on what is scored sees nothing of the other part, from which values are chosen; the
            # test part comes last, for its models are kept.
            leaks = adapt.part == "test"
            for on in (EVALUATED_PARTS[1:], EVALUATED_PARTS[:1]) if leaks else (EVALUATED_PARTS,):
                work = replace(adaptation, part=on[0] if leaks else "train")
                again = made if len(stretches) == 1 else map(models, stretches)
                found += self._score("trained", (self._adapted(piece, adapt, work) for piece in again), on)
        return found

    def _stretches(self) -> Sequence[Tensor]:
        """The evaluated clients, in stretches whose personal models fit into memory."""
        size = max(1, MODEL_CHUNK_BYTES // max(1, self.engine.task.params.nbytes()))
        return list(self.eval_ids.split(size))  # type: ignore[no-untyped-call]

    def _probed(self, send: Sender, work: LocalTraining, ids: Tensor, buffers: Params) -> Params:
        """The models of clients `ids` as their next round would begin with them."""
        rule, work = self.algorithm.client, replace(work, steps=0, epochs=None)
        models = []
        numbers = torch.arange(len(ids), device=ids.device)
        for rows in numbers.split(PROBE_CHUNK):  # type: ignore[no-untyped-call]
            some, kept = ids[rows], self.clients.sent
            sent = send(some) if kept is None else kept.rows(self.clients.rows_of(some))
            inputs = self.clients.training_inputs(some, sent, torch.zeros_like(some, dtype=torch.bool))
            done = self.engine.train(rule, some, inputs._replace(buffers=buffers.rows(rows)), work)
            models.append(vmap(rule.trained_model)(done.upload, done.local_state))
        return concatenate(models)

    def _adapted(self, models: ClientModels, adapt: FineTune, work: LocalTraining) -> ClientModels:
        if adapt.steps:
            work = replace(work, steps=adapt.steps, epochs=None)
        work = replace(work, lr=adapt.lr or work.lr)
        yes = torch.ones_like(models.ids, dtype=torch.bool)
        inputs = ClientInputs(Payload(models.params), {}, models.buffers, yes, ~yes)
        done = self.engine.train(SGD(), models.ids, inputs, work)
        return ClientModels(models.ids, done.upload.params, done.buffers)

    def _global(
        self, w: Params | None, found: Sequence[PointScores], mean_buffers: Params | None, alike: bool
    ) -> list[PointScores]:
        """The scores of the one global model, if there is one; `found` has its own if what was received is `alike`."""
        network, personal = self.algorithm.network, self.clients.personal
        scores = next((one.scores for one in found if one.part == "test"), None)
        if w is None or scores is None or (personal and not (network and network.generic)):
            return []
        first = personal.rows(0)
        whole = Params({k: w[k] if k in w else torch.zeros_like(first[k]) for k in self.clients.names})
        if self.clients.buffers or not alike:
            n = len(self.eval_ids)
            if mean_buffers is None:
                total = self.total_buffers()
                mean_buffers = total.map(lambda b: b / n)
            # Without shared statistics, those of the clients' mean stand in.
            buffers = mean_buffers.map(lambda b, like: b.to(like.dtype), self.clients.buffers.rows(0))
            scores = self.engine.evaluate(whole.repeat(n), buffers.repeat(n), "test", self.eval_ids)
        return [PointScores("global", "test", self.eval_ids, scores)]

    def total_buffers(self) -> Params:
        """The sum over evaluated clients of their buffers after communication, in float64."""
        return self.clients.received_buffers(self.eval_ids).map(lambda b: b.double().sum(0))

    def _score(
        self,
        point: Literal["received", "trained"],
        pieces: Iterable[ClientModels],
        on: Sequence[EvalPart] = EVALUATED_PARTS,
    ) -> list[PointScores]:
        """The scores of one point on both parts, or those that are given."""
        parts = [part for part in on if self.federation.sizes(part).any()]
        scores: dict[EvalPart, list[Scores]] = {part: [] for part in parts}
        for piece in pieces:
            for part in parts:
                scores[part].append(self.engine.evaluate(piece.params, piece.buffers, part, piece.ids))
            if point == self.algorithm.headline:
                self._deploy(piece)
        return [
            PointScores(point, part, self.eval_ids, Scores(*map(torch.cat, zip(*some, strict=True))))
            for part, some in scores.items()
        ]

    def _deploy(self, piece: ClientModels) -> None:
        """Keep what was evaluated; on disk if it is too much to be made at once."""
        if len(piece.ids) == len(self.eval_ids):
            self.headline_models = piece.params, piece.buffers
            return
        rows = torch.searchsorted(self.eval_ids, piece.ids)
        if not int(rows[0]):
            room = RowStorage(len(self.eval_ids), disk=True)
            self.headline_models = (
                room.allocate("headline_models", piece.params.rows(0)),
                room.allocate("headline_models", piece.buffers.rows(0)),
            )
        for stack, new in zip(self.headline_models, piece[1:], strict=True):
            stack.put_rows(rows, new)


def _select_clients(models: ClientModels, ids: Tensor) -> ClientModels:
    """The models of those that are among clients `ids`."""
    rows = torch.isin(models.ids, ids, assume_unique=True).nonzero().flatten()
    return ClientModels(models.ids[rows], models.params.rows(rows), models.buffers.rows(rows))


def _is_one_model(models: Params) -> bool:
    """Whether all rows are one model."""
    return all(v.stride(0) == 0 for v in models.values())
