"""The round loop: sample, broadcast, train, aggregate, record."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.algorithm import Algorithm
from ..core.effect import Effect
from ..core.errors import DivergedError, RunError, summarize_error
from ..core.params import Params, copy_dense
from ..core.payload import MixingMatrices, Payload, count_traffic
from ..core.settings import Settings
from ..data import Federation
from ..data.federated import FederationInfo
from ..data.input_spec import InputSpec
from ..runs.callbacks import Callback
from ..runs.context import Progress, RunContext
from ..runs.folder import RunFolder
from ..runs.metrics import score_clients, summarize_scores
from ..runs.predictions import predict_for_choice, predict_parts
from ..runs.result import Result
from ..runs.rows import RowStack, RowStorage
from ..runs.stopping import StoppingRule, compute_criterion_of_others
from ..runs.store import RoundRecord, RunStore
from ..server.average import client_weights, weighted_sum
from .backends.base import Backend, TrainReply, TrainRequest, find_rows
from .backends.local import LocalBackend
from .checkpoints import RunCheckpoints, RunStatus, load_models, save_models
from .clients.evaluation import MODEL_CHUNK_BYTES, PointScores
from .clients.options import ClientLedger
from .clients.state import PayloadFactory, to_cpu
from .effects import average_effects, choose_measured, read_last_mixing
from .notes import collect_client_scalars, collect_facts, collect_missing_facts, collect_notes, merge_clients
from .server import Server
from .setup import make_run_context
from .uploads.pipeline import UploadPipeline
from .uploads.step import PastRounds, RoundUploads, StepContext

CHECKPOINT_SHARE = 0.1
"""Share of the time that may go into checkpoints; a killed run repeats at most the rounds since the last one."""

COMMIT_AFTER_S = 2.0
"""Seconds after which finished rounds are committed, with a checkpoint if its time is due, so that others see them."""

Columns = tuple[NDArray[Any], ...]
"""Samples, right predictions and sum of losses of clients, (E,) each."""
BackendFactory = Callable[[RunContext, PayloadFactory], Backend]


class RoundLoop:
    """Run the rounds of one method on one federation."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation | FederationInfo,
        model: nn.Module,
        settings: Settings,
        config: dict[str, Any],
        folder: RunFolder | None = None,
        make_backend: BackendFactory | None = None,
    ) -> None:
        """Prepare the first round, or the round after the last checkpoint in the folder.

        The federation has the clients' data, or the facts that a server knows about data elsewhere. Without a folder,
        the run is in memory alone; without `make_backend`, clients are in this process.
        """
        self.config, self.folder = config, folder
        self.context = make_run_context(algorithm, federation, model, settings)
        self.server = Server(self.context, folder.rows if folder else None)
        self.store = RunStore(folder.metrics if folder else None)
        self.status = RunStatus()
        self._restored_models: tuple[RowStack, RowStack] | None = None
        self.stopping = StoppingRule(self.context.early_stopping)
        self.choice = StoppingRule(self.context.early_stopping, compute_criterion_of_others)
        self._new_scores: dict[int, dict[str, Columns]] = {}  # round -> scores of which callbacks do not know yet
        if make_backend:
            self.backend = make_backend(self.context, self.server.make_payload)
        else:
            self.backend = LocalBackend(self.context, self.server.storage, make_payload=self.server.make_payload)
        traits = self.backend.traits
        self.uploads = UploadPipeline(
            StepContext(
                self.context,
                is_deployed=traits.is_deployed,
                counts_are_claimed=traits.is_deployed,
                max_norm_ratio=traits.largest_update,
                has_one_model=self.server.global_model is not None,
                sees_uploads=not traits.merges_clients,
            )
        )
        self.ledger = ClientLedger(self.context, is_secret=self.backend.traits.is_deployed)
        self.checkpoints: RunCheckpoints | None = None
        if folder:
            parts = self.server, self.backend, self.store, self.uploads, self.ledger
            self.checkpoints = RunCheckpoints(folder, config["algorithm"], self.context, *parts)
            self.status = self.checkpoints.load()
            for rule in (self.stopping, self.choice):
                rule.add_rounds(self.store.scores("validation"), self.context.algorithm.evaluation_point)
            if self._lacks_received_scores(self.record.round):
                self._defer_evaluation(self.record.round)

    @property
    def record(self) -> RoundRecord:
        return self.status.record

    def run(self, callbacks: Sequence[Callback] = ()) -> Result:
        """Run the rounds that are left; if a callback returns True, the run is saved and returned unfinished."""
        settings = self.context.settings
        rounds = settings.rounds
        started = time.perf_counter() - self.record.seconds
        saved = committed = time.perf_counter()
        cost, stopped = 0.0, False
        if self.folder:
            self.folder.write_start(self._facts, self._inputs)
            if self.record.round == rounds:
                # The result alone is missing; other files may have been damaged since.
                self._restore_models()
                self._save_models()
                self._commit()
            # Before others see a model of the next round, its cost is on the disk.
            if self.checkpoints and self.checkpoints.spends_secretly:
                self._save()
        for r in range(self.record.round + 1, rounds + 1):
            is_last = r == rounds
            self.run_round(r, should_evaluate=settings.is_evaluated(r))
            now = time.perf_counter()
            self.status.record = self.record._replace(seconds=now - started)
            self.store.add_round(self.record)
            asks_to_stop = self._call(callbacks)
            stopped = not is_last and self.backend.can_save and asks_to_stop
            if is_last:
                self._save_models()
            is_late = now - committed > COMMIT_AFTER_S
            is_due = self.backend.traits.is_deployed or (is_late and now - saved > cost / CHECKPOINT_SHARE)
            if is_last or stopped or (is_due and self.backend.can_save):
                self._save()
                saved = committed = time.perf_counter()
                cost = saved - now
            elif is_late:
                self._commit()
                committed = now
            if stopped:
                break
        return self._make_result(is_finished=not stopped)

    def evaluate_arrival(self) -> None:
        """Evaluate, as round 0, the models that clients are sent before they have trained at all."""
        self.ledger.add_evaluation()
        self._record_scores(0, self.backend.evaluate_received(0, self.server.make_payload, self.server.global_model))

    def run_round(self, r: int, *, should_evaluate: bool) -> None:
        backend, server = self.backend, self.server
        request = TrainRequest.draw(
            self.context, r, update_server=server.rule.traits.should_update, should_evaluate=should_evaluate
        )
        reply = self._train(request)
        self.ledger.add_round(request, reply)
        scores = backend.evaluate_trained(server.make_payload) if should_evaluate else []
        reply, mixing = self._aggregate(r, reply)
        if should_evaluate:
            self.ledger.add_evaluation()
            is_last = r == self.context.settings.rounds
            if is_last or not self._defer_evaluation(r):
                scores += backend.evaluate_received(r, server.make_eval_payload, server.global_model)
            self._record_scores(r, scores)
            if not self.context.replies_immediately:
                mixing = server.take_mixing(reply.ids)
            if mixing and not backend.traits.merges_clients:
                self.store.add_mixing(r, mixing)
        self._record(request, reply)

    def _defer_evaluation(self, r: int) -> bool:
        return self.backend.defer_evaluation(r, self.server.make_eval_payload, self.server.global_model)

    def _train(self, request: TrainRequest) -> TrainReply:
        """Send to clients and train them: all of a round at once, or as many as fit into memory."""
        size = max(len(request.cohort), self.backend.traits.max_clients)
        chunks = torch.split(request.ids, size)
        reply = TrainReply.merge([self._train_chunk(request._replace(ids=chunk)) for chunk in chunks])
        self._record_scores(*self.backend.take_late_scores())
        if reply.diverged and not reply.n_trained and not len(reply.ids):
            self.store.commit()
            raise DivergedError(
                f"round {request.round}: training diverged on every client that trained ({len(reply.diverged)} of "
                f"them; values are not finite); lower the learning rate (lr is {self.context.settings.training.lr:g}), "
                "or an option that is too large"
            )
        return reply

    def _train_chunk(self, request: TrainRequest) -> TrainReply:
        context, ids, make_payload = self.context, request.ids, self.server.make_payload
        if context.replies_immediately:  # clients go on with the last answer
            return self.backend.train(request, None, make_payload)
        payload = make_payload(ids)
        is_for_cohort = context.algorithm.participation.receive == "cohort"
        rows = find_rows(ids, request.cohort, context.n_clients) if is_for_cohort else None
        self._count_down(*((ids, payload) if rows is None else (ids[rows], payload.rows(rows))))
        return self.backend.train(request, payload, make_payload)

    def _aggregate(self, r: int, reply: TrainReply) -> tuple[TrainReply, MixingMatrices | None]:
        """Process the uploads, make the server's new state and mean statistics, and reply if the method does.

        Return the reply without rejected uploads, and the mixing matrices behind the server's replies.
        """
        backend, server, n = self.backend, self.server, self.context.n_train[reply.ids]
        received = RoundUploads(r, reply.ids, reply.sent, reply.upload, reply.buffers, n, backend.statistics)
        if self.ledger.refusals.is_on:  # else no honest client refuses
            refused = frozenset(reply.refused)
            received = replace(received, refused=refused, alone=refused.union(reply.alone))
        uploads = self.uploads.receive(received.from_start(server.rule))
        if uploads.rejected:
            reply = reply._replace(ids=uploads.ids, faults={**reply.faults, **uploads.rejected})
            backend.reject(r, uploads.rejected)
            server.discard_uploads(uploads.rejected)
        ids = uploads.ids
        if not len(ids):
            server.skip_round()
            return reply, None
        server.aggregate(uploads)
        if uploads.quarantined:
            server.quarantine(uploads.quarantined)
            backend.quarantine(r, uploads.quarantined)
        traffic = server.rule.bytes_up(server.state, ids, uploads.upload)
        self.status.traffic["up"] += self.uploads.count_bytes(traffic, uploads.upload)
        if backend.statistics:
            mean = weighted_sum(client_weights(uploads.n, "samples"), uploads.buffers)
            backend.statistics = self.uploads.finish_statistics(mean)
            self.status.traffic["up"] += count_traffic(backend.statistics, len(ids))
        if not self.context.replies_immediately:
            return reply, None
        payload, mixing = server.broadcast(ids)
        backend.receive(ids, payload)
        self._count_down(ids, payload)
        return reply, mixing

    def _count_down(self, ids: Tensor, sent: Payload) -> None:
        if len(ids):
            self.status.traffic["down"] += self.server.rule.bytes_down(self.server.state, ids, sent)
            self.status.traffic["down"] += count_traffic(self.backend.statistics, len(ids))

    def _record(self, request: TrainRequest, reply: TrainReply) -> None:
        self.store.add_faults(request.round, reply.faults)
        absent = sorted({*request.dropouts.tolist(), *reply.faults})
        bytes_up, bytes_down = (self.status.traffic[way].total() for way in ("up", "down"))
        steps = self.record.steps + reply.steps
        self.status.record = RoundRecord(
            request.round, self.record.seconds, bytes_up, bytes_down, steps, list(reply.diverged), absent
        )

    def _record_scores(self, r: int, scores: Sequence[PointScores]) -> None:
        for point, part, ids, client_scores in scores:
            self.store.add_scores(r, point, part, client_scores, ids)
            n, correct, loss = columns = tuple(column.cpu().numpy() for column in client_scores)
            if (n > 0).any():
                self._new_scores.setdefault(r, {})[f"{part}_{point}"] = columns
            if (point, part) == (self.context.algorithm.evaluation_point, "test"):
                has = n > 0
                values = score_clients(n[has], correct[has], loss[has], deviation=self._deviation)
                self.status.mean, self.status.evaluated = float(values.mean()), r
        self._keep_best(r, scores)

    def _call(self, callbacks: Sequence[Callback]) -> bool:
        """Tell callbacks of a round; return whether one asks to stop."""
        for r in sorted(self._new_scores):
            points = self._new_scores[r]
            if r == self.record.round and not any(key.endswith("_received") for key in points):
                continue  # the rest comes with the next round
            del self._new_scores[r]
            if callbacks:
                scores = {key: summarize_scores(*one, deviation=self._deviation) for key, one in points.items()}
                for one in callbacks:
                    one.on_evaluate(r, scores)
        progress = self._describe_progress()
        asks_to_stop = [one.on_round_end(progress, self.server.state) for one in callbacks]
        return any(asks_to_stop)

    @property
    def _deviation(self) -> float | None:
        scale = self.context.federation.target_scale
        return None if scale is None else scale.error_unit

    def _describe_progress(self) -> Progress:
        is_rmse, done = self._deviation is not None, self.record
        accuracy, rmse = (None, self.status.mean) if is_rmse else (self.status.mean, None)
        rounds = self.context.settings.rounds
        return Progress(done.round, rounds, accuracy, done.seconds, rmse, self.status.evaluated)

    def _keep_best(self, r: int, scores: Sequence[PointScores]) -> None:
        point = self.context.algorithm.evaluation_point
        found = next((one for one in scores if (one.point, one.part) == (point, "validation")), None)
        if found is not None and found.scores.n.sum():
            values = np.array([column.tolist() for column in found.scores], dtype=float)
            for rule, keep in ((self.stopping, self.backend.keep_models), (self.choice, self.backend.keep_for_choice)):
                is_best = rule.add_round(r, values)
                if is_best is not None and is_best.any():
                    keep(found.ids[torch.from_numpy(is_best).to(found.ids.device)])

    @cached_property
    def _facts(self) -> dict[str, Any]:
        facts = {**collect_facts(self.context), **self.uploads.collect_facts()}
        return merge_clients(facts, self.context) if self.backend.traits.merges_clients else facts

    @cached_property
    def _inputs(self) -> InputSpec | None:
        return InputSpec.from_federation(self.context.federation, self.context.eval_ids.tolist())

    def _commit(self) -> None:
        """Store all numbers so far; a run that goes on computes the rounds after the last checkpoint again."""
        self.store.set_traffic(self.status.traffic)
        self.store.commit()

    def _save(self) -> None:
        self._commit()
        if self.checkpoints:
            self.checkpoints.save(self.status)

    @property
    def _models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers (E, ...) of the evaluated clients; empty if they stay with the clients."""
        return self._restored_models or self.backend.evaluated_models

    def _restore_models(self) -> None:
        """Restore the models of the last round if the checkpoint has none: from their file, or by evaluating again."""
        if self.backend.evaluated_models[0] or self.backend.traits.is_deployed:
            return
        self._restored_models = self._load_models()
        if not self._restored_models and not self._evaluate_again():
            self._restored_models = Params(), Params()
            self.status.notes.append(
                f"{self.config['algorithm']}: the models of the last round are lost, because their file was lost or "
                "damaged, and no checkpoint holds them; for models and predictions, train the run again"
            )

    def _load_models(self) -> tuple[RowStack, RowStack] | None:
        """Read the models and buffers (E, ...) that the run wrote; None if their file is missing or damaged."""
        assert self.folder
        n, device = len(self.context.eval_ids), self.context.device
        try:
            params, buffers = load_models(self.folder.models)
        except RunError:
            return None
        params = params.map(lambda v: v.expand(n, *v.shape[1:]))
        # Where a GPU may not hold all models, they lie on the disk, as in training.
        is_on_disk = device.type != "cpu" and n * params.rows(0).nbytes() > MODEL_CHUNK_BYTES
        if not is_on_disk:
            return params.map(lambda v: v.to(device)), buffers.map(lambda v: v.to(device))
        storage, every = RowStorage(n, is_on_disk=True), torch.arange(n)
        stacks = [
            storage.allocate("evaluated_models", one.rows(0).map(lambda v: v.to(device))) for one in (params, buffers)
        ]
        for stack, values in zip(stacks, (params, buffers), strict=True):
            stack.put_rows(every, values)
        return stacks[0], stacks[1]

    def _evaluate_again(self) -> bool:
        """Evaluate the last round again, which makes its models; tell whether they have the scores of before."""
        r, algorithm, server = self.record.round, self.context.algorithm, self.server
        if algorithm.evaluation_point == "trained" and not algorithm.fine_tune:
            scores = self.backend.evaluate_trained(server.make_payload)
        else:
            scores = self.backend.evaluate_received(r, server.make_eval_payload, server.global_model)
        key = algorithm.evaluation_point, "test"
        again = next((one.scores.loss for one in scores if (one.point, one.part) == key), None)
        before = next((s[2] for _, point, s in self.store.scores("test", since=r) if point == key[0]), None)
        if again is None or before is None:
            return False
        return np.allclose(again.cpu().numpy(), before, rtol=1e-4, equal_nan=True)

    def _save_models(self) -> None:
        """Write every client's model; before the last checkpoint, which says that this is done."""
        models, buffers = self._models
        if self.folder and models:
            save_models(self.folder.models, models, buffers)

    def _lacks_received_scores(self, r: int) -> bool:
        """Tell whether the checkpoint is between an evaluated round and its deferred scores."""
        settings = self.context.settings
        points = {point for round_, point, _ in self.store.scores("test", since=r) if round_ == r}
        return 0 < r < settings.rounds and settings.is_evaluated(r) and "received" not in points

    def _measure_effects(self) -> list[Effect]:
        mixing = read_last_mixing(self.store.mixing(self.context.n_clients))
        effects = self.server.rule.measure_effects(self.server.state, mixing)
        eval_ids = self.context.eval_ids
        ids = choose_measured(eval_ids[self.context.n_train[eval_ids] > 0])
        if not len(ids) or self.ledger.spends:  # a measurement would spend epsilon
            return [*effects]
        measured = self.backend.measure_clients(self.record.round, ids, self.server.make_payload)
        return [*effects, *average_effects(measured)]

    def _make_result(self, *, is_finished: bool) -> Result:
        context, records = self.context, self.store.rounds()
        name = self.config["algorithm"]
        notes = collect_notes(context, name, self.server.state, self.backend.personal_example, self.store)
        past = PastRounds(self.record.round, self.status.repeats)
        reports, more, common_notes = self.uploads.report(past)
        notes += [f"{name}: {note}" for note in more]
        notes += self.ledger.notes(name, self.status.repeats)
        of_clients, client_reports = self.ledger.facts(self.status.repeats)
        effects: list[Effect] = []
        if is_finished:
            try:
                effects = self._measure_effects()
            except Exception as error:  # a fault in a custom rule must not lose the run
                notes.append(f"{name}: the effect of the mechanism could not be measured: {summarize_error(error)}")
        notes += [f"{name}: {effect.sentence}" for effect in effects if effect.is_idle]
        models, buffers = self._models
        if is_finished:
            measured, more = self.uploads.measure(models, buffers)
            reports |= {step: {**reports.get(step, {}), **facts} for step, facts in measured.items()}
            notes += [f"{name}: {note}" for note in more]
        facts = {
            **self._facts,
            "effects": [[*effect.mechanism, effect.value] for effect in effects],
            "notes": [*notes, *common_notes, *self.status.notes, *self.backend.notes],
            **of_clients,
            **collect_missing_facts(context, records, is_merged=self.backend.traits.merges_clients),
            "reports": {**client_reports, **reports},
            **(collect_client_scalars(context, models) if is_finished else {}),
        }
        if not is_finished and isinstance(models, Params) and isinstance(buffers, Params):
            # The models that were evaluated last may be the ones that clients hold, and went on changing.
            models, buffers = models.map(copy_dense), buffers.map(copy_dense)
        predictions = {}
        if is_finished:
            predictions = predict_parts(context, models, buffers)
            predictions |= predict_for_choice(context, self.backend.models_for_choice, (models, buffers))
        return Result(
            self.config,
            facts,
            self.store,
            is_finished,
            predictions,
            to_cpu(models),
            to_cpu(buffers),
            context.task.model,
            inputs=self._inputs,
        )
