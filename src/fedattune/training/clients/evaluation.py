"""Evaluation at three points: trained (after local training), received (after communication), and global."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ...client import SGD, PartSGD, find_optimizer, find_resting_model
from ...core.algorithm import Algorithm, FineTune
from ...core.params import Params, concatenate
from ...core.payload import Payload
from ...core.selectors import BatchNorms
from ...data import Federation
from ...engine.base import EVALUATED_PARTS, ClientInputs, ClientOutputs, Engine, EvalPart, Scores
from ...engine.batches import LocalTraining
from ...runs.rows import RowStack, RowStorage
from .state import ClientStates, PayloadFactory

PROBE_CHUNK = 32
"""Clients whose received models are made together if that takes a look at data."""

MODEL_CHUNK_BYTES = 1 << 30
"""Bytes of personal models that are made and evaluated together."""


class ClientModels(NamedTuple):
    """The models and buffers (E, ...) of clients (E,), sorted by client."""

    ids: Tensor
    params: Params
    buffers: Params


class PointScores(NamedTuple):
    """The scores (E,) of clients `ids` (E,) at one point on one part of their data.

    The point is received, trained, or global: the one global model of the method on every client's part.
    """

    point: str
    part: EvalPart
    ids: Tensor
    scores: Scores


@dataclass
class LocalEvaluation:
    """Evaluate clients (E,) of a local backend, and keep the models that were evaluated last."""

    algorithm: Algorithm
    engine: Engine
    federation: Federation
    client_states: ClientStates
    eval_ids: Tensor
    evaluated_models: tuple[RowStack, RowStack] = field(default_factory=lambda: (Params(), Params()))

    def select_trained(self, ids: Tensor, trained: ClientOutputs) -> ClientModels | None:
        """Return the trained models of the clients that are evaluated; None if there are none."""
        if self.algorithm.fine_tune:
            return None  # then `trained` is the received model after fine-tuning
        if not torch.equal(ids, self.eval_ids):
            rows = torch.isin(ids, self.eval_ids, assume_unique=True).nonzero().flatten()
            ids, trained = ids[rows], trained.rows(rows)
        if not len(ids):
            return None
        return ClientModels(
            ids, vmap(self.algorithm.client.trained_model)(trained.upload, trained.local_state), trained.buffers
        )

    def evaluate_trained(
        self, trained_models: Sequence[ClientModels], make_payload: PayloadFactory
    ) -> list[PointScores]:
        """Score clients after local training; those that are not among `trained_models` rest."""
        if self.algorithm.fine_tune:
            return []

        def models(ids: Tensor) -> ClientModels:
            if len(trained_models) == 1 and torch.equal(trained_models[0].ids, ids):
                return trained_models[0]
            pieces = [_select_clients(mine, ids) for mine in trained_models]
            busy = torch.cat([mine.ids for mine in pieces]) if pieces else ids[:0]
            if len(resting := ids[~torch.isin(ids, busy)]):
                params = self.client_states.models(find_resting_model(self.algorithm.client), resting, make_payload)
                pieces.append(ClientModels(resting, params, self.client_states.held_buffers(resting)))
            params, buffers = (
                like.map(lambda v: v.new_empty(len(ids), *v.shape[1:]))
                for like in (pieces[0].params, pieces[0].buffers)
            )
            for mine in pieces:
                rows = torch.searchsorted(ids, mine.ids)
                params.put_rows(rows, mine.params)
                buffers.put_rows(rows, mine.buffers)
            return ClientModels(ids, params, buffers)

        return self._score("trained", map(models, self._chunks()))

    def evaluate_received(
        self,
        make_payload: PayloadFactory,
        w: Params | None,
        training: LocalTraining,
        fine_tuning: LocalTraining,
        mean_buffers: Params | None,
    ) -> list[PointScores]:
        """Score clients after communication; then again after fine-tuning, if the method does that.

        The global model `w`, if there is one, lacks the tensors that never leave a client. Its buffers are
        `mean_buffers`, by default the mean of the buffers that clients have here.
        """
        fine_tune, rule = self.algorithm.fine_tune, self.algorithm.client
        needs_probe = (probe := rule.plan.probe) is not None and probe.makes_received_model

        def models(ids: Tensor) -> ClientModels:
            buffers = self.client_states.received_buffers(ids)
            if needs_probe:
                return ClientModels(ids, self._probe(make_payload, training, ids, buffers), buffers)
            params = self.client_states.models(rule.received_model, ids, make_payload)
            return ClientModels(ids, params, buffers)

        chunks = received_chunks = self._chunks()
        if len(chunks) > 1 and not needs_probe and _is_one_model(models(self.eval_ids[:2]).params):
            received_chunks = [self.eval_ids]  # one model for all takes no memory
        all_models = [models(self.eval_ids)] if len(received_chunks) == 1 else []
        scores = self._score("received", all_models or map(models, received_chunks))
        scores += self._score_global(w, scores, mean_buffers, bool(all_models) and _is_one_model(all_models[0].params))
        if fine_tune:
            # Fine-tuning on the scored part sees nothing of the other part, from which values are chosen. The test
            # part comes last, for its models are kept.
            uses_scored_part = fine_tune.part == "test"
            groups = (EVALUATED_PARTS[1:], EVALUATED_PARTS[:1]) if uses_scored_part else (EVALUATED_PARTS,)
            for parts in groups:
                tuning = replace(fine_tuning, part=parts[0] if uses_scored_part else "train")
                again = all_models if len(chunks) == 1 else map(models, chunks)
                tuned_models = (self._fine_tune(one, fine_tune, tuning) for one in again)
                scores += self._score("trained", tuned_models, parts)
        return scores

    def _chunks(self) -> Sequence[Tensor]:
        """Split the evaluated clients, so that the personal models of a chunk fit into memory."""
        size = max(1, MODEL_CHUNK_BYTES // max(1, self.engine.task.params.nbytes()))
        return list(self.eval_ids.split(size))  # type: ignore[no-untyped-call]

    def _probe(self, make_payload: PayloadFactory, training: LocalTraining, ids: Tensor, buffers: Params) -> Params:
        rule, training = self.algorithm.client, replace(training, steps=0, epochs=None)
        models = []
        numbers = torch.arange(len(ids), device=ids.device)
        for rows in numbers.split(PROBE_CHUNK):  # type: ignore[no-untyped-call]
            some, payloads = ids[rows], self.client_states.sent
            sent = make_payload(some) if payloads is None else payloads.rows(self.client_states.rows_of(some))
            yes = torch.ones_like(some, dtype=torch.bool)
            fresh = yes if payloads is None else None
            inputs = self.client_states.training_inputs(some, sent, ~yes, fresh)
            outputs = self.engine.train(rule, some, inputs._replace(buffers=buffers.rows(rows)), training)
            models.append(vmap(rule.trained_model)(outputs.upload, outputs.local_state))
        return concatenate(models)

    def _fine_tune(self, models: ClientModels, fine_tune: FineTune, training: LocalTraining) -> ClientModels:
        if fine_tune.steps:
            training = replace(training, steps=fine_tune.steps, epochs=None)
        training = replace(training, lr=fine_tune.lr or fine_tune.share * training.lr)
        yes = torch.ones_like(models.ids, dtype=torch.bool)
        inputs = ClientInputs(Payload(models.params), {}, models.buffers, yes, ~yes)
        optimizer = find_optimizer(self.algorithm.client)
        is_part = fine_tune.tensors == "personal"
        rule = PartSGD("personal", optimizer=optimizer) if is_part else SGD(optimizer=optimizer)
        outputs = self.engine.train(rule, models.ids, inputs, training)
        return ClientModels(models.ids, outputs.upload.params, outputs.buffers)

    def _score_global(
        self, w: Params | None, received_scores: Sequence[PointScores], mean_buffers: Params | None, alike: bool
    ) -> list[PointScores]:
        network, personal = self.algorithm.network, self.client_states.personal
        scores = next((one.scores for one in received_scores if one.part == "test"), None)
        if w is None or scores is None or (personal and not (network and network.generic)):
            return []
        if not set(personal).isdisjoint(BatchNorms().names(self.engine.task.model)):
            return []  # what is personal would be zero, and a BatchNorm layer of zeros gives nothing on
        first = personal.rows(0)
        whole = Params({k: w[k] if k in w else torch.zeros_like(first[k]) for k in self.client_states.names})
        # If all clients received one model, and there are no buffers, `received_scores` has its scores already.
        if self.client_states.buffers or not alike:
            n = len(self.eval_ids)
            if mean_buffers is None:
                total = self.total_buffers()
                mean_buffers = total.map(lambda b: b / n)
            # Without averaged statistics, the mean over clients stands in.
            buffers = mean_buffers.map(lambda b, like: b.to(like.dtype), self.client_states.buffers.rows(0))
            (scores,) = self.engine.evaluate(whole.repeat(n), buffers.repeat(n), ("test",), self.eval_ids)
        return [PointScores("global", "test", self.eval_ids, scores)]

    def total_buffers(self) -> Params:
        """Return the sum over evaluated clients of their buffers after communication, in float64."""
        return self.client_states.received_buffers(self.eval_ids).map(lambda b: b.double().sum(0))

    def _score(
        self,
        point: Literal["received", "trained"],
        pieces: Iterable[ClientModels],
        parts: Sequence[EvalPart] = EVALUATED_PARTS,
    ) -> list[PointScores]:
        parts = [part for part in parts if self.federation.sizes(part).any()]
        scores: list[list[Scores]] = []
        for piece in pieces:
            scores.append(self.engine.evaluate(piece.params, piece.buffers, parts, piece.ids))
            if point == self.algorithm.evaluation_point:
                self._keep(piece)
        return [
            PointScores(point, part, self.eval_ids, Scores(*map(torch.cat, zip(*some, strict=True))))
            for part, some in zip(parts, zip(*scores, strict=True), strict=True)
        ]

    def _keep(self, piece: ClientModels) -> None:
        if len(piece.ids) == len(self.eval_ids):
            self.evaluated_models = piece.params, piece.buffers
            return
        rows = torch.searchsorted(self.eval_ids, piece.ids)
        if not int(rows[0]):
            storage = RowStorage(len(self.eval_ids), is_on_disk=True)
            params, buffers = (storage.allocate("evaluated_models", stack.rows(0)) for stack in piece[1:])
            self.evaluated_models = params, buffers
        for stack, new in zip(self.evaluated_models, piece[1:], strict=True):
            stack.put_rows(rows, new)


def _select_clients(models: ClientModels, ids: Tensor) -> ClientModels:
    rows = torch.isin(models.ids, ids, assume_unique=True).nonzero().flatten()
    return ClientModels(models.ids[rows], models.params.rows(rows), models.buffers.rows(rows))


def _is_one_model(models: Params) -> bool:
    return all(v.stride(0) == 0 for v in models.values())
