"""The backend of clients in this process: their data, their state, and the engine that trains and evaluates them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...client import list_correction_entries, trains_parts
from ...core.algorithm import StepMeasuring
from ...core.effect import Effect
from ...core.faults import Fault
from ...core.network import MethodModule
from ...core.own_code import get_short_name, is_reference
from ...core.params import Params, select_prefix
from ...core.payload import Payload
from ...core.streams import Stream
from ...data import Federation
from ...engine import make_engine
from ...engine.base import ClientOutputs
from ...engine.batches import LocalTraining
from ...engine.sequential import SequentialEngine
from ...runs.context import RunContext
from ...runs.rows import RowStack, RowStorage
from ..clients.acceptance import DECISION, ON_TRIAL, Accepting, Judge, sample_rows
from ..clients.evaluation import MODEL_CHUNK_BYTES, ClientModels, LocalEvaluation, PointScores
from ..clients.record_privacy import RecordPlan
from ..clients.state import ClientStates, KeptModels, PayloadFactory
from ..effects import MEASURED_SAMPLES, measure_module, measure_training
from ..setup import find_own_names, make_schedule, resolve_weight_decay
from ..uploads.pipeline import make_client_steps
from ..uploads.step import RoundUploads, StepContext
from .base import CHOICE_KEY, Backend, BackendTraits, TrainReply, TrainRequest, find_rows

REQUEST_CHUNK_BYTES = 1 << 30
"""Bytes of models that are trained together, unless more clients than that upload."""


MAX_CHOICE_BYTES = 1 << 29
"""Bytes of the models that are kept for the choice between methods; of larger ones, none are."""


class LocalBackend(Backend):
    """Train and evaluate clients in this process.

    `client_ids` (M,) are the clients' numbers among all N, sorted. `round` is the one in which they train with the
    payload that they have or are sent.
    """

    def __init__(
        self,
        context: RunContext,
        storage: RowStorage,
        *,
        make_payload: PayloadFactory | None = None,
        client_ids: Tensor | None = None,
        is_one_message: bool = False,
    ) -> None:
        """Make engine and state.

        The federation of the context has an entry for all clients, and data for the clients of this backend, which are
        `client_ids` (M,), sorted; by default all. Without `make_payload`, the first payloads come later.
        """
        settings, task = context.settings, context.task
        self.context, self.storage, self.notes = context, storage, []
        self.traits = BackendTraits(
            max(1, REQUEST_CHUNK_BYTES // max(1, task.params.nbytes())),
            is_deployed=is_one_message,  # only the process of a real node ends after a message
        )
        self._step_context = StepContext(context, is_deployed=is_one_message)
        self.upload_steps = make_client_steps(self._step_context)
        federation = context.federation
        assert isinstance(federation, Federation)  # facts about a federation have no data to train on
        for step in self.upload_steps:
            federation = step.prepare_data(federation, context)
        self.client_ids = context.all_ids if client_ids is None else client_ids
        n_samples = float(context.n_train[self.client_ids].double().mean())
        self._steps_per_round = settings.training.count_steps(n_samples)
        self._make_engine = partial(
            make_engine,
            settings.execution.engine,
            task,
            federation,
            clip=settings.privacy.record.clip if settings.privacy.record else None,
        )
        self.engine = self._make_engine(
            steps=self._steps_per_round * (1 if is_one_message else settings.rounds),
            cohort_size=min(settings.participation.cohort_size(context.n_clients), len(self.client_ids)),
        )
        if isinstance(self.engine, SequentialEngine) and settings.execution.engine != "sequential":
            name, loss = type(task.model).__name__, settings.loss.name
            cause = (
                f"{name} or the loss {get_short_name(loss)} has operations"
                if is_reference(loss)
                else f"{name} has layers"
            )
            self.notes.append(
                f"the model {cause} that torch.func cannot differentiate: it trained with --engine sequential, one "
                "client after the other"
            )
        own_buffers = None
        if network := context.algorithm.network:
            counts = torch.from_numpy(federation.label_counts("train"))
            if federation.kind != "class":  # shares of classes are those of whole samples
                counts = counts[:, :0]
            own_buffers = network.client_buffers(counts.to(context.device, self.engine.dtype)[self.client_ids])
        self.client_states = ClientStates.start(
            context,
            self.client_ids,
            storage,
            make_payload=make_payload,
            own_buffers=own_buffers,
            memory={s.name: one for s in self.upload_steps if (one := s.init_memory(self._step_context))},
        )
        eval_ids = context.eval_ids[torch.isin(context.eval_ids, self.client_ids)]
        self.evaluation = LocalEvaluation(context.algorithm, self.engine, federation, self.client_states, eval_ids)
        self.round = 1
        if isinstance(rule := context.algorithm.client, Accepting):
            is_private = settings.privacy.record is not None
            self.client_states.judge = Judge(
                rule,
                self.engine,
                self.engine.take_rows(sample_rows(federation, takes_training=not is_private)),
                frozenset(self.client_states.personal),
                lambda: self.plan_training(self.round, Stream.TRAINING),
            )
        self._trained_models: list[ClientModels] = []
        # Workers hear of no rejected uploads.
        self._corrected = list_correction_entries(context.algorithm.client, task.params) if make_payload else ()
        self._before: dict[int, list[tuple[Tensor, dict[str, Params]]]] = {}
        self._kept = KeptModels.start(context, storage)
        # Workers keep none: a second copy of all models would cross the network.
        n_bytes = len(self.client_ids) * (task.params.nbytes() + task.buffers.nbytes())
        n_validated = int((federation.sizes("validation")[context.eval_ids.cpu()] > 0).sum())
        is_on = make_payload is not None and n_validated > 1 and n_bytes <= MAX_CHOICE_BYTES
        self._kept_for_choice = KeptModels.start(context, storage, CHOICE_KEY, is_on=is_on)
        self._record_plan = RecordPlan.make(context, is_secret=is_one_message)

    @property
    def planned_evaluations(self) -> int:
        return self._record_plan.planned_evaluations if self._record_plan else 0

    @property
    def personal_example(self) -> Params:
        return self.client_states.personal.rows(0)

    @property
    def statistics(self) -> Params:
        return self.client_states.statistics

    @statistics.setter
    def statistics(self, new: Params) -> None:
        self.client_states.statistics = new

    @property
    def evaluated_models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers (E, ...) that were kept, or else evaluated last at the evaluation point."""
        if not self._kept.is_kept.any():
            return self.evaluation.evaluated_models
        eval_ids = self.evaluation.eval_ids
        size = len(eval_ids) * self.engine.task.params.nbytes()
        if size > MODEL_CHUNK_BYTES and len(eval_ids) == len(self.client_ids):
            return self._kept.params, self._kept.buffers
        rows = self.client_states.rows_of(eval_ids)
        return self._kept.params.rows(rows), self._kept.buffers.rows(rows)

    @property
    def models_for_choice(self) -> tuple[RowStack, RowStack]:
        kept, rows = self._kept_for_choice, self.client_states.rows_of(self.evaluation.eval_ids)
        return (kept.params.rows(rows), kept.buffers.rows(rows)) if kept.is_kept.any() else (Params(), Params())

    def keep_models(self, ids: Tensor) -> None:
        self._keep(self._kept, ids)

    def keep_for_choice(self, ids: Tensor) -> None:
        if self._kept_for_choice.params:
            self._keep(self._kept_for_choice, ids)

    def _keep(self, kept: KeptModels, ids: Tensor) -> None:
        places = torch.searchsorted(self.evaluation.eval_ids, ids)
        models, buffers = self.evaluation.evaluated_models
        kept.put(self.client_states.rows_of(ids), models.rows(places), buffers.rows(places))

    def receive(self, ids: Tensor, payload: Payload) -> None:
        with self.storage.share_cores():
            self.client_states.receive(ids, payload)

    def reject(self, r: int, faults: Mapping[int, Fault]) -> None:
        """Let clients forget what corrections learned in round r from uploads that the server did not use."""
        states, rejected = self.client_states, torch.tensor(sorted(faults), device=self.client_ids.device)
        with self.storage.share_cores():
            for ids, before in self._before.get(r, []):
                at = torch.isin(ids, rejected).nonzero().flatten()
                for k, v in before.items():
                    states.local_state[k].put_rows(states.rows_of(ids[at]), v.rows(at))

    def train(self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory) -> TrainReply:
        self.round = request.round
        self._before = {self.round: self._before.get(self.round, [])}
        with self.storage.share_cores():
            return self._train(request, payload)

    def _train(self, request: TrainRequest, payload: Payload | None) -> TrainReply:
        client_states, ids = self.client_states, request.ids
        if payload is None:
            assert client_states.sent is not None
            payload = client_states.sent.rows(client_states.rows_of(ids))
        else:
            client_states.receive(ids, payload)
        if len(request.dropouts):  # nothing of their round is kept, so it need not be computed
            here = (~torch.isin(ids, request.dropouts)).nonzero().flatten()
            ids, payload = ids[here], payload.rows(here)
        if not len(ids):
            return TrainReply(ids, payload, payload, Params())
        is_uploaded = torch.isin(ids, request.cohort) & request.update_server
        inputs = client_states.training_inputs(ids, payload, is_uploaded)
        if self._corrected:
            self._before[self.round].append((ids, {k: inputs.local_state[k] for k in self._corrected}))
        training = self.plan_training(request.round, Stream.TRAINING)
        trained = self.engine.train(self.context.algorithm.client, ids, inputs, training)
        is_finite, steps = trained.find_finite(), int(trained.n_steps.sum())
        diverged = ids[~is_finite].tolist()
        if diverged:  # they keep what they had, and upload nothing
            rows = is_finite.nonzero().flatten()
            ids, trained, payload = ids[rows], trained.rows(rows), payload.rows(rows)
        if request.should_evaluate and len(ids) and (models := self.evaluation.select_trained(ids, trained)):
            self._trained_models.append(models)
        if len(ids):
            client_states.store_trained(ids, trained)
        refused, alone = self._find_refusals(ids, trained, inputs.fresh, is_finite)
        n_trained, uploading = len(ids), find_rows(ids, request.cohort, self.context.n_clients)
        if uploading is not None:
            ids, payload, trained = ids[uploading], payload.rows(uploading), trained.rows(uploading)
        upload = trained.upload._replace(params=trained.upload.params.without(client_states.personal))
        buffers = trained.buffers.only(client_states.statistics)
        uploads = self._transform(request.round, ids, payload, upload, buffers)
        return TrainReply(
            ids, payload, uploads.upload, uploads.buffers, n_trained, steps, diverged, refused=refused, alone=alone
        )

    def _transform(self, r: int, ids: Tensor, sent: Payload, upload: Payload, buffers: Params) -> RoundUploads:
        states = self.client_states
        n = self.context.n_train[ids]
        uploads = RoundUploads(r, ids, sent, upload, buffers, n, states.statistics)
        if not len(ids) or not self.upload_steps:
            return uploads
        rows, uploads = states.rows_of(ids), uploads.from_start(self.context.algorithm.server)
        for step in self.upload_steps:
            kept = states.memory.get(step.name)
            memory = Params() if kept is None else kept.rows(rows)
            uploads, memory = step.on_client(uploads, memory, self._step_context)
            if kept is not None:
                kept.put_rows(rows, memory)
        return uploads

    def _find_refusals(
        self, ids: Tensor, trained: ClientOutputs, fresh: Tensor, is_finite: Tensor
    ) -> tuple[list[int], list[int]]:
        """Return the clients that refused a new payload, and those that trained from their own models."""
        if self.client_states.judge is None or not len(ids):
            return [], []
        is_new, refused = fresh[is_finite.nonzero().flatten()], trained.local_state[DECISION]["refused"]
        return ids[is_new & (refused > ON_TRIAL)].tolist(), ids[refused > 0].tolist()

    def evaluate_trained(self, make_payload: PayloadFactory) -> list[PointScores]:
        models, self._trained_models = self._trained_models, []
        return self.evaluation.evaluate_trained(models, make_payload)

    def evaluate_received(
        self, r: int, make_payload: PayloadFactory, w: Params | None, mean_buffers: Params | None = None
    ) -> list[PointScores]:
        self.round = r + 1
        training = self.plan_training(r + 1, Stream.TRAINING)
        fine_tuning = self.plan_training(r, Stream.FINE_TUNING)
        return self.evaluation.evaluate_received(make_payload, w, training, fine_tuning, mean_buffers)

    def measure_clients(self, r: int, ids: Tensor, make_payload: PayloadFactory) -> list[list[Effect]]:
        """Measure the mechanisms of clients: in one more round, which is dropped, and on received models."""
        rule, states = self.context.algorithm.client, self.client_states
        effects: list[list[Effect]] = [[] for _ in ids]
        self.round = r + 1
        if isinstance(rule, StepMeasuring) and rule.mechanisms:
            kept, every = states.sent, torch.ones_like(ids, dtype=torch.bool)
            payload = make_payload(ids) if kept is None else kept.rows(states.rows_of(ids))
            inputs = states.training_inputs(ids, payload, every, every if kept is None else None)
            # At the rate of the last round: a schedule may have ended at a rate of zero.
            training = _stay_at_rate(self.plan_training(r + 1, Stream.TRAINING), r)
            engine = self._make_engine(steps=self._steps_per_round, cohort_size=len(ids))  # for one round
            effects = measure_training(rule, engine, ids, inputs, training)
        if isinstance(module := self.engine.task.model, MethodModule):
            # Not the models of the last evaluation: a run that went on after its last round has none.
            params, buffers = (states.models(rule.received_model, ids, make_payload), states.received_buffers(ids))
            for i, client in enumerate(ids.tolist()):
                state = {**params.rows(i), **buffers.rows(i)}
                effects[i] += measure_module(module, state, self._sample_inputs(client))
        return effects

    def _sample_inputs(self, client: int) -> Tensor:
        federation = self.context.federation
        assert isinstance(federation, Federation)
        index = torch.as_tensor(federation.part("train")[client][:MEASURED_SAMPLES])
        return federation.features(index.to(federation.y.device), self.engine.dtype)

    def plan_training(self, r: int, stream: int) -> LocalTraining:
        settings, plan = self.context.settings, self._record_plan
        privacy = None
        if plan:
            privacy = plan.fine_tuning() if stream == Stream.FINE_TUNING else plan.training()
        personal = tuple(self.client_states.personal)
        if stream == Stream.FINE_TUNING or trains_parts(self.context.algorithm.client):
            personal = find_own_names(self.context.algorithm, self.context.task.model)
        return LocalTraining(
            seed=settings.seed,
            stream=stream,
            round=r,
            lr=settings.training.lr,
            batch_size=settings.training.batch_size,
            steps=settings.training.local_steps,
            epochs=settings.training.epochs,
            weight_decay=resolve_weight_decay(self.context.algorithm, settings),
            # Fine-tuning comes after training, when a schedule may have ended at a rate of zero.
            schedule=make_schedule(settings) if stream == Stream.TRAINING else None,
            max_grad_norm=settings.training.max_grad_norm,
            drop_last=self.context.task.has_batch_statistics,
            cohort_size=settings.participation.cohort_size(self.context.n_clients),
            personal_names=personal,
            augment=settings.training.augmentations,
            privacy=privacy,
        )

    def state_tree(self) -> dict[str, Any]:
        kept = {"kept": self._kept.state_tree()}
        if self._kept_for_choice.params:
            kept[CHOICE_KEY] = self._kept_for_choice.state_tree()
        return self.client_states.state_tree() | kept

    def load_kept(self, state: Mapping[str, Tensor]) -> None:
        """Take over kept models, by paths such as `params/0.weight`, and for which clients they are."""
        rows = torch.arange(len(state["is_kept"]), device=self.client_ids.device)
        params, buffers = (select_prefix(state, f"{part}/") for part in ("params", "buffers"))
        self._kept.put(rows, params, buffers)
        self._kept.is_kept = state["is_kept"].clone()

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        self.client_states.load_state_tree(tree)
        self._kept.load_state_tree(tree["kept"])
        if CHOICE_KEY in tree:
            self._kept_for_choice.load_state_tree(tree[CHOICE_KEY])
        elif self._kept_for_choice.params:  # rounds before the checkpoint are not known
            self._kept_for_choice = KeptModels(Params(), Params(), self._kept_for_choice.is_kept)


def _stay_at_rate(training: LocalTraining, r: int) -> LocalTraining:
    """Return the training with the constant rate that the schedule gives for round r."""
    if training.schedule is None:
        return training
    factor = training.schedule.factor(torch.tensor(float(r), dtype=torch.float64))
    return replace(training, lr=training.lr * float(factor), schedule=None)
