"""The round loop: who takes part, what is sent, trained, evaluated, aggregated, and stored."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm
from ..core.errors import DivergedError
from ..core.hardware import MIN_PARALLEL_WORK, resolve_device, use_threads
from ..core.io import copy_tensors, flatten_tree, save_tensors, write_json
from ..core.params import Params, concatenate
from ..core.payload import Payload, ServerState, Traffic, concatenate_payloads, count_traffic
from ..core.settings import Settings
from ..core.task import Task
from ..data import Federation
from ..data.federated import FederationInfo
from ..data.input_spec import InputSpec
from .backends.base import Backend, TrainReply, TrainRequest, find_rows
from .backends.local import LocalBackend
from .client_state import copy_rows
from .context import Progress
from .evaluation import PointScores
from .notes import collect_client_facts, collect_missing_facts, collect_notes
from .result import Result
from .sampling import sample_cohort, sample_dropouts, sample_eval_ids
from .setup import apply_settings, check_compatible, init_server, resolve_weight_decay
from .storage import RoundRecord, RunStore, restore_tree
from .storage.folder import RunFolder
from .storage.rows import RowStorage, check_newcomer_memory, load_rows, row_bytes

CHECKPOINT_SHARE = 0.1
"""Share of the time that may go into checkpoints; a killed run repeats at most the rounds since the last one."""


COMMIT_AFTER_S = 2.0
"""Seconds after which rounds are committed even where no checkpoint is due, to be seen from outside."""


class TrainedChunk(NamedTuple):
    """What came of an order to train, and the bytes that went to the clients before."""

    report: TrainReply
    down: Traffic


def _load_traffic(meta: Mapping[str, str], way: str, record: RoundRecord) -> Traffic:
    """What went one way until a checkpoint; older ones know the sum alone."""
    total = {"up": record.bytes_up, "down": record.bytes_down}[way]
    return Counter(json.loads(meta[way])) if way in meta else Counter({"all": total})


def merge_replies(reports: Sequence[TrainReply]) -> tuple[Payload, Payload, Params]:
    """What all clients that upload were sent, what they upload, and their buffers."""
    buffers = concatenate([report.buffers for report in reports])
    return (
        concatenate_payloads([report.sent for report in reports]),
        concatenate_payloads([r.upload for r in reports]),
        buffers,
    )


class RoundLoop:
    """One run: its moving parts, and what one round does with them.

    `model` is what is trained: the user's model, or what the method makes of it. `spread` says where clients are:
    by default in this process.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation | FederationInfo,
        model: nn.Module,
        settings: Settings,
        config: dict[str, Any],
        folder: RunFolder | None,
        spread: "Callable[[RoundLoop], Backend] | None" = None,
    ) -> None:
        where = resolve_device(settings)
        self.settings, self.config, self.folder = settings, config, folder
        self.algorithm = apply_settings(algorithm, settings)
        self.everyone = torch.arange(federation.n_clients, device=where)
        self.federation: Federation | FederationInfo = federation.to(where)
        self.n_train = federation.sizes("train").to(where)
        self.judged = sample_eval_ids(settings, federation).to(where)
        self.task = Task(model, settings.mixed_precision != "off").to(where, getattr(torch, settings.dtype))
        n = federation.n_clients
        server, shared = init_server(self.algorithm, self.task, n, settings.seed)
        self.room = RowStorage.choose(
            settings, n, row_bytes(self.algorithm, self.task, server), folder.rows if folder else None
        )
        small = settings.cohort_size(n) * self.task.params.numel() < MIN_PARALLEL_WORK
        self.spares_a_core = self.room.disk and small
        self.server = self.room.allocate_server(server)
        if settings.held_out:
            check_newcomer_memory(self.server)
        check_compatible(self.algorithm, self.server, self.everyone[:1])
        self.shares = bool(shared)
        self.averages_buffers = self.shares and self.algorithm.bn_buffers == "average"
        self.answers = self.algorithm.participation.receive == "reply"
        self.store = RunStore(folder.metrics if folder else None)
        self.record = RoundRecord(0, 0.0, 0, 0, 0, [], [])
        self.up: Traffic = Counter()
        self.down: Traffic = Counter()
        self.accuracy: float | None = None
        self.said: list[str] = []
        self.place = self._settle() if spread is None else spread(self)
        if folder:
            self._load(folder)

    def _settle(self) -> Backend:
        """All clients in this process."""
        assert isinstance(self.federation, Federation)  # of a census there are no data to train on
        return LocalBackend(
            self.algorithm,
            self.federation,
            self.task,
            self.settings,
            self.room,
            send=self.send,
            averages_buffers=self.averages_buffers,
        )

    def send(self, ids: Tensor) -> Payload:
        """What the server sends to clients `ids` now, one row each."""
        return self.algorithm.server.broadcast(self.server, ids).payload

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What is known of the run from its beginning."""
        return {
            "headline": self.algorithm.headline,
            "weight_decay": resolve_weight_decay(self.algorithm, self.settings),
            "n_parameters": self.task.params.numel(),
            "input_shape": list(self.federation.input_shape),
            "classes": list(self.federation.classes),
            **collect_client_facts(self),
        }

    @cached_property
    def _inputs(self) -> InputSpec | None:
        return InputSpec.from_federation(self.federation, self.judged.tolist())

    def go(self, watch: Callable[[Progress], None], stop: Callable[[], bool]) -> Result:
        """Run the rounds that are left."""
        started = time.perf_counter() - self.record.seconds
        saved, cost, stopped = time.perf_counter(), 0.0, False
        shown = saved
        if self.folder:
            write_json(self.folder.facts, self._facts)
            if self._inputs:
                self._inputs.save(self.folder.inputs)
        for r in range(self.record.round + 1, self.settings.rounds + 1):
            last = r == self.settings.rounds
            self._round(r, evaluate=last or r % self.settings.eval_every == 0)
            now = time.perf_counter()
            self.record = self.record._replace(seconds=now - started)
            self.store.add_round(self.record)
            watch(Progress(r, self.settings.rounds, self.accuracy, self.record.seconds))
            stopped = not last and stop()
            if last:
                self._save_models()
            due = self.place.commits_every_round or now - saved > cost / CHECKPOINT_SHARE
            if last or stopped or due:
                self._save()
                saved = shown = time.perf_counter()
                cost = saved - now
            elif now - shown > COMMIT_AFTER_S:
                self._commit()
                shown = now
            if stopped:
                break
        return self._result(finished=not stopped)

    def evaluate_arrival(self) -> None:
        """Evaluate, as round 0, what clients are sent before they have trained at all."""
        self._keep(0, self.place.received(0, self.send, self._global_model()))

    def _round(self, r: int, evaluate: bool) -> None:
        participation, server = self.algorithm.participation, self.algorithm.server
        everyone = self.everyone
        asked = sample_cohort(self.settings, len(everyone), r).to(everyone.device)
        gone = sample_dropouts(self.settings, len(everyone), r).to(everyone.device)
        away = asked[gone[asked] & self.shares]  # who shares nothing is not asked for anything

        ids = asked if participation.train == "cohort" else everyone
        receivers = asked if participation.receive == "cohort" else everyone
        order = TrainRequest(r, ids, asked, away, server.should_update, evaluate)
        with self._beside_the_disk():
            turns = [
                self._turn(order._replace(ids=some), receivers)
                for some in torch.split(ids, max(len(asked), self.place.at_once))
            ]
        for turn in turns:
            self.down += turn.down
        reports = [turn.report for turn in turns]
        dropped = [i for report in reports for i in report.dropped]
        lost = {i: why for report in reports for i, why in report.lost.items()}
        if dropped and not any(report.n_trained for report in reports):
            self._stop_diverged(r, len(dropped))
        if evaluate:
            self._keep(r, self.place.trained(r, self.send))
        heard = [report for report in reports if len(report.ids)]
        steps = self.record.steps + sum(report.steps for report in reports)
        ids = torch.cat([report.ids for report in heard]) if heard else asked[:0]
        if heard:
            with self._beside_the_disk():
                self._aggregate(ids, *merge_replies(heard))
        if evaluate:
            self._keep(r, self.place.received(r, self.send, self._global_model()))
            if len(ids) and (matrices := server.broadcast(self.server, ids).mixing):
                self.store.add_mixing(r, matrices)
        missing = sorted({*away.tolist(), *lost})
        self.store.add_faults(r, lost)
        up, down = self.up.total(), self.down.total()
        self.record = RoundRecord(r, self.record.seconds, up, down, steps, dropped, missing)

    def _turn(self, order: TrainRequest, receivers: Tensor) -> TrainedChunk:
        """Send to clients and train them: all of a round, or as many as fit into memory."""
        server, ids, payload = self.algorithm.server, order.ids, None
        down: Traffic = Counter()
        if not self.answers:
            payload = self.send(ids)
            rows = find_rows(ids, receivers, len(self.everyone))
            to, sent = (ids, payload) if rows is None else (ids[rows], payload.rows(rows))
            if len(to):
                down = server.bytes_down(self.server, to, sent) + count_traffic(self.place.common, len(to))
        return TrainedChunk(self.place.train(order, payload, self.send), down)

    def _aggregate(self, ids: Tensor, sent: Payload, upload: Payload, buffers: Params) -> None:
        """Hand the cohort's uploads to the server, and its answer back."""
        server, n = self.algorithm.server, self.n_train[ids]
        self.server = server.aggregate(self.server, ids, sent, upload, n)
        self.up += server.bytes_up(self.server, ids, upload)
        if self.averages_buffers:
            self.place.average_buffers(buffers, n)
            self.up += count_traffic(self.place.common, len(ids))
        if self.answers:
            answer = self.send(ids)
            self.place.arrived(ids, answer)
            self.down += server.bytes_down(self.server, ids, answer) + count_traffic(
                self.place.common, len(ids)
            )

    def _global_model(self) -> Params | None:
        return self.algorithm.server.global_model(self.server)

    def _keep(self, r: int, found: Sequence[PointScores]) -> None:
        """Store the scores of round r."""
        for point, part, ids, scores in found:
            self.store.add_scores(r, point, part, scores, ids)
            if (point, part) == (self.algorithm.headline, "test"):
                known = scores.n > 0
                self.accuracy = float((scores.correct[known] / scores.n[known]).mean())

    def _beside_the_disk(self) -> AbstractContextManager[None]:
        """Outside the engine, leave a core to the rows that are written; small operations would only wait for it."""
        return use_threads(1) if self.spares_a_core else nullcontext()

    def _stop_diverged(self, r: int, n: int) -> None:
        self.store.commit()
        raise DivergedError(
            f"round {r}: training diverged on every client that trained ({n} of them; values are not "
            f"finite); lower the learning rate (lr is {self.settings.lr:g}), or a hyper-parameter that is too large"
        )

    def _commit(self) -> None:
        """Store all numbers so far; those after the last checkpoint are computed again where the run goes on."""
        self.store.set_traffic({"up": self.up, "down": self.down})
        self.store.commit()

    def _save(self) -> None:
        self._commit()
        if self.folder:
            tree = {"server": self.server, "clients": self.place.tree()}
            meta: dict[str, Any] = {"record": self.record, "accuracy": self.accuracy, "said": self.said}
            meta |= {"up": self.up, "down": self.down}
            text = {k: json.dumps(v) for k, v in meta.items()}
            self.folder.checkpoints.save(self.record.round, tree, text)

    def _save_models(self) -> None:
        """Write every client's model; before the last checkpoint, which says that this is done."""
        models, buffers = self.place.deployed
        if self.folder and models:
            if isinstance(models, Params) and all(v.stride(0) == 0 for v in models.values()):
                models = models.rows(slice(0, 1))
            tree = flatten_tree({"params": load_rows(models), "buffers": load_rows(buffers)})
            save_tensors(self.folder.models, copy_tensors(tree), {})

    def _load(self, folder: RunFolder) -> None:
        """Go on from the last checkpoint, if there is one; the store may hold rounds after it."""
        if folder.checkpoints.has_any:
            saved = folder.checkpoints.load()
            tree = {"server": self.server, "clients": self.place.tree()}
            tree = restore_tree(tree, saved.flat, rows=folder.rows, older=saved.older_slots)
            self.server = cast(ServerState, tree["server"])
            self.place.load(tree["clients"])
            self.record = RoundRecord(*json.loads(saved.meta["record"]))
            self.accuracy = json.loads(saved.meta["accuracy"])
            self.up, self.down = (_load_traffic(saved.meta, way, self.record) for way in ("up", "down"))
            went_on = f"the run went on from round {self.record.round}"
            self.said = json.loads(saved.meta.get("said", "[]"))
            self.said += [f"{self.config['algorithm']}: {one}; {went_on}" for one in saved.warnings]
        self.store.forget_after(self.record.round)

    def _result(self, finished: bool) -> Result:
        facts = {**self._facts, "notes": [*collect_notes(self), *self.said], **collect_missing_facts(self)}
        models, buffers = self.place.deployed
        if not finished and isinstance(models, Params) and isinstance(buffers, Params):
            # What was evaluated last may be what clients hold, and went on changing.
            models, buffers = copy_rows(models), copy_rows(buffers)
        return Result(
            self.config, facts, self.store, finished, models, buffers, self.task.model, inputs=self._inputs
        )
