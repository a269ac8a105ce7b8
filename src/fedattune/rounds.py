"""The round loop: who takes part, what is sent, trained, evaluated, aggregated, and stored."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .clients import ClientStates, owned
from .cohorts import ADAPTATION, TRAINING, absent, cohort, device, evaluated
from .config import Settings
from .core import Algorithm, Payload, State
from .data import Federation
from .engines import Trained, Work, make_engine
from .engines.base import join
from .engines.machine import WORTH_ALL_CORES, threads
from .errors import DivergedError
from .evaluation import Evaluation, Models
from .params import Params, concatenate
from .remarks import client_facts, run_notes
from .result import Result
from .rooms import Room, check_joining, in_memory, row_bytes
from .runs import RoundRecord, RunStore, disk_rows, load_tensors, restore, save_tensors
from .runs.folder import RunFolder
from .starting import check_extras, fitted, start_server
from .task import Task

CHECKPOINT_SHARE = 0.1
"""Share of the time that may go into checkpoints; a killed run repeats at most the rounds since the last one."""


TURN_BYTES = 1 << 30
"""Bytes of models that are trained together in one turn, unless more clients than that upload."""


class Progress(NamedTuple):
    """Where a run stands; `accuracy` is the mean over clients at the headline point, at the last evaluation."""

    round: int
    rounds: int
    accuracy: float | None
    seconds: float


class Turn(NamedTuple):
    """What clients that trained together left: of `ids`, those that upload, what they were sent, and the rest.

    Attributes:
        trained: what training left on those that upload.
        bytes_down, steps: of all that were sent something, and trained.
        dropped: clients whose training was not finite.
        models: those of evaluated clients after training.
        n_trained: clients whose training went well.

    """

    ids: Tensor
    sent: Payload
    trained: Trained | None
    bytes_down: int
    steps: int = 0
    dropped: Sequence[int] = ()
    models: Models | None = None
    n_trained: int = 0


def _joined(turns: Sequence[Turn]) -> tuple[Payload, Trained]:
    """What all clients that upload were sent, and what training left on them."""
    done = [turn.trained for turn in turns if turn.trained is not None]
    if len(done) == 1:
        return turns[0].sent, done[0]
    extra = {k: concatenate([turn.sent.extra[k] for turn in turns]) for k in turns[0].sent.extra}
    return Payload(concatenate([turn.sent.params for turn in turns]), extra), join(done, concatenate)


class Run:
    """One run: its moving parts, and what one round does with them.

    `model` is what is trained: the user's model, or what the method makes of it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        model: nn.Module,
        settings: Settings,
        config: dict[str, Any],
        folder: RunFolder | None,
    ) -> None:
        where = device(settings)
        self.settings, self.config, self.folder = settings, config, folder
        self.algorithm = fitted(algorithm, settings)
        self.everyone = torch.arange(federation.n_clients, device=where)
        self.federation = federation.to(where)
        self.n_train = federation.sizes("train").to(where)
        self.task = Task(model, settings.mixed_precision != "off").to(where, getattr(torch, settings.dtype))
        steps = settings.all_steps(float(self.n_train.double().mean()))
        n = federation.n_clients
        cohort = settings.cohort_size(n)
        self.engine = make_engine(settings.engine, self.task, self.federation, steps=steps, cohort=cohort)
        server, shared = start_server(self.algorithm, self.task, n, settings.seed)
        self.room = Room.choose(
            settings, n, row_bytes(self.algorithm, self.task, server), folder.rows if folder else None
        )
        small = cohort * self.task.params.numel() < WORTH_ALL_CORES
        self.spares_a_core = self.room.disk and small
        self.at_once = max(1, TURN_BYTES // max(1, self.task.params.nbytes()))
        self.server = self.room.settle(server)
        if settings.held_out:
            check_joining(self.server)
        check_extras(self.algorithm, self.server, self.everyone[:1])
        self.shares = bool(shared)
        self.averages_buffers = self.shares and self.algorithm.bn_buffers == "average"
        averaged = self.task.bn_statistics if self.averages_buffers else ()
        own_buffers = None
        if self.algorithm.network:
            counts = torch.from_numpy(federation.label_counts("train")).to(where, self.engine.dtype)
            own_buffers = self.algorithm.network.client_buffers(counts)
        self.clients = ClientStates.start(
            self.algorithm,
            self.task,
            self.server,
            self.everyone,
            self.room,
            averaged=averaged,
            own_buffers=own_buffers,
        )
        self.store = RunStore(folder.metrics if folder else None)
        self.record = RoundRecord(0, 0.0, 0, 0, 0, [], [])
        self.evaluation = Evaluation(
            self.algorithm,
            self.engine,
            self.federation,
            self.clients,
            self.store,
            evaluated(settings, federation).to(where),
        )
        if folder and folder.checkpoint.exists():
            self._load(folder)

    def go(self, watch: Callable[[Progress], None], stop: Callable[[], bool]) -> Result:
        """Run the rounds that are left."""
        started = time.perf_counter() - self.record.seconds
        saved, cost, stopped = time.perf_counter(), 0.0, False
        for r in range(self.record.round + 1, self.settings.rounds + 1):
            last = r == self.settings.rounds
            self._round(r, evaluate=last or r % self.settings.eval_every == 0)
            now = time.perf_counter()
            self.record = self.record._replace(seconds=now - started)
            self.store.add_round(self.record)
            watch(Progress(r, self.settings.rounds, self.evaluation.accuracy, self.record.seconds))
            stopped = not last and stop()
            if last:
                self._save_models()
            if last or stopped or now - saved > cost / CHECKPOINT_SHARE:
                self._save()
                saved = time.perf_counter()
                cost = saved - now
            if stopped:
                break
        return self._result(finished=not stopped)

    def evaluate_arrival(self) -> None:
        """Evaluate, as round 0, what clients are sent before they have trained at all."""
        self.evaluation.received(0, self.server, self._work(1, TRAINING), self._work(0, ADAPTATION))

    def _round(self, r: int, evaluate: bool) -> None:
        participation, server = self.algorithm.participation, self.algorithm.server
        everyone = self.everyone
        asked = cohort(self.settings, len(everyone), r).to(everyone.device)
        gone = absent(self.settings, len(everyone), r).to(everyone.device)
        away = asked[gone[asked] & self.shares]  # who shares nothing is not asked for anything

        ids = asked if participation.train == "cohort" else everyone
        receivers = asked if participation.receive == "cohort" else everyone
        with self._beside_the_disk():
            turns = [
                self._turn(r, some, asked=asked, away=away, receivers=receivers, evaluate=evaluate)
                for some in torch.split(ids, max(len(asked), self.at_once))
            ]
        down = self.record.bytes_down + sum(turn.bytes_down for turn in turns)
        dropped = [i for turn in turns for i in turn.dropped]
        if dropped and not any(turn.n_trained for turn in turns):
            self._stop_diverged(r, len(dropped))
        if evaluate:
            self.evaluation.trained(r, [t.models for t in turns if t.models is not None], self.server)
        heard = [turn for turn in turns if len(turn.ids)]
        up, steps = self.record.bytes_up, self.record.steps + sum(turn.steps for turn in turns)
        ids = torch.cat([turn.ids for turn in heard]) if heard else asked[:0]
        if heard:
            with self._beside_the_disk():
                received, answered = self._aggregate(ids, *_joined(heard))
            up, down = up + received, down + answered
        if evaluate:
            work, adaptation = self._work(r + 1, TRAINING), self._work(r, ADAPTATION)
            self.evaluation.received(r, self.server, work, adaptation)
            if len(ids) and (matrices := server.mixing(self.server, ids)):
                self.store.add_mixing(r, matrices)
        self.record = RoundRecord(r, self.record.seconds, up, down, steps, dropped, away.tolist())

    def _turn(
        self, r: int, ids: Tensor, *, asked: Tensor, away: Tensor, receivers: Tensor, evaluate: bool
    ) -> Turn:
        """Send to clients `ids`, train them, and keep what is theirs; all of a round, or as many as fit into memory."""
        server, down = self.algorithm.server, 0
        if self.clients.sent is None:
            payload = server.broadcast(self.server, ids)
            self.clients.arrived(ids, payload)
            rows = self._places(ids, receivers)
            to, sent = (ids, payload) if rows is None else (ids[rows], payload.rows(rows))
            if len(to):
                down = server.bytes_down(self.server, to, sent) + self.clients.common.nbytes() * len(to)
        else:
            payload = self.clients.sent.rows(ids)
        if len(away):  # nothing of their round is kept, so it need not be computed
            here = (~torch.isin(ids, away)).nonzero().flatten()
            ids, payload = ids[here], payload.rows(here)
        if not len(ids):
            return Turn(ids, payload, None, down)
        heard = torch.isin(ids, asked) & server.learns
        inputs = self.clients.inputs(ids, payload, heard)
        trained = self.engine.train(self.algorithm.client, ids, inputs, self._work(r, TRAINING))
        good = trained.finite()
        dropped = ids[~good].tolist()
        if dropped:  # they keep what they had, and upload nothing
            rows = good.nonzero().flatten()
            ids, trained, payload = ids[rows], trained.rows(rows), payload.rows(rows)
        models = self.evaluation.of_trained(ids, trained) if evaluate and len(ids) else None
        if len(ids):
            self.clients.keep(ids, trained)
        rows, n_trained, steps = self._places(ids, asked), len(ids), int(trained.n_steps.sum())
        if rows is not None:
            ids, payload, trained = ids[rows], payload.rows(rows), trained.rows(rows)
        return Turn(ids, payload, trained, down, steps, dropped, models, n_trained)

    def _aggregate(self, ids: Tensor, sent: Payload, trained: Trained) -> tuple[int, int]:
        """Hand the cohort's uploads to the server, and its answer back; the bytes of both."""
        server, n = self.algorithm.server, self.n_train[ids]
        upload = trained.upload._replace(params=trained.upload.params.without(self.clients.personal))
        self.server = server.aggregate(self.server, ids, sent, upload, n)
        up, down = server.bytes_up(self.server, ids, upload), 0
        if self.averages_buffers:
            self.clients.average_buffers(trained.buffers, n)
            up += self.clients.common.nbytes() * len(ids)
        if self.clients.sent is not None:
            answer = server.broadcast(self.server, ids)
            self.clients.arrived(ids, answer)
            down = server.bytes_down(self.server, ids, answer) + self.clients.common.nbytes() * len(ids)
        return up, down

    def _beside_the_disk(self) -> AbstractContextManager[None]:
        """Outside the engine, leave a core to the rows that are written; small operations would only wait for it."""
        return threads(1) if self.spares_a_core else nullcontext()

    def _work(self, r: int, stream: int) -> Work:
        return Work(
            seed=self.settings.seed,
            stream=stream,
            round=r,
            lr=self.settings.lr,
            batch_size=self.settings.batch_size,
            steps=self.settings.local_steps,
            epochs=self.settings.epochs,
            weight_decay=self._weight_decay(),
            drop_last=self.task.uses_batch_statistics,
            cohort=self.settings.cohort_size(len(self.everyone)),
            personal=tuple(self.clients.personal),
        )

    def _weight_decay(self) -> float:
        given = (self.algorithm.weight_decay, self.settings.weight_decay)
        return next((decay for decay in given if decay is not None), self.algorithm.default_weight_decay)

    def _places(self, ids: Tensor, some: Tensor) -> Tensor | None:
        """The places in `ids` of those that are among `some`; None if all are."""
        if len(some) == len(self.everyone):
            return None
        among = torch.isin(ids, some, assume_unique=True)
        return None if bool(among.all()) else among.nonzero().flatten()

    def _stop_diverged(self, r: int, n: int) -> None:
        self.store.commit()
        raise DivergedError(
            f"round {r}: training diverged on every client that trained ({n} of them; values are not "
            f"finite); lower the learning rate (lr is {self.settings.lr:g}), or a hyper-parameter that is too large"
        )

    def _save(self) -> None:
        self.store.commit()
        if self.folder:
            tree = {"server": self.server, "clients": self.clients.tree()}
            meta = {"record": json.dumps(self.record), "accuracy": json.dumps(self.evaluation.accuracy)}
            on_disk = disk_rows(tree)
            for stack in on_disk:
                stack.sync()
            save_tensors(self.folder.checkpoint, tree, meta)
            for stack in on_disk:
                stack.commit()

    def _save_models(self) -> None:
        """Write every client's model; before the last checkpoint, which says that this is done."""
        if self.folder:
            models, buffers = self.evaluation.deployed
            if isinstance(models, Params) and all(v.stride(0) == 0 for v in models.values()):
                models = models.rows(slice(0, 1))
            save_tensors(self.folder.models, {"params": in_memory(models), "buffers": in_memory(buffers)}, {})

    def _load(self, folder: RunFolder) -> None:
        flat, meta = load_tensors(folder.checkpoint)
        tree = restore({"server": self.server, "clients": self.clients.tree()}, flat, rows=folder.rows)
        self.server = cast(State, tree["server"])
        self.clients.load(tree["clients"])
        self.record = RoundRecord(*json.loads(meta["record"]))
        self.evaluation.accuracy = json.loads(meta["accuracy"])
        self.store.forget_after(self.record.round)

    def _result(self, finished: bool) -> Result:
        facts = {
            "headline": self.algorithm.headline,
            "notes": run_notes(self),
            "weight_decay": self._weight_decay(),
            "n_parameters": self.task.params.numel(),
            "input_shape": list(self.federation.input_shape),
            "classes": list(self.federation.classes),
            **client_facts(self),
        }
        models, buffers = self.evaluation.deployed
        if not finished and isinstance(models, Params) and isinstance(buffers, Params):
            # What was evaluated last may be what clients hold, and went on changing.
            models, buffers = owned(models), owned(buffers)
        return Result(self.config, facts, self.store, finished, models, buffers, self.task.model)
