"""The round loop: who takes part, what is sent, trained, evaluated, aggregated, and stored."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from .client import SGD
from .clients import ClientStates, owned
from .cohorts import ADAPTATION, TRAINING, cohort, device
from .config import Settings
from .core import Algorithm, FineTune, Payload, State
from .data import Federation
from .engines import Inputs, Trained, Work, make_engine
from .errors import DivergedError
from .params import Params
from .result import Point, Result
from .runs import RoundRecord, RunStore, load_tensors, restore, save_tensors
from .runs.folder import RunFolder
from .task import Task

CHECKPOINT_SHARE = 0.1
"""Share of the time that may go into checkpoints; a killed run repeats at most the rounds since the last one."""


class Progress(NamedTuple):
    """Where a run stands; `accuracy` is the mean over clients at the headline point, at the last evaluation."""

    round: int
    rounds: int
    accuracy: float | None
    seconds: float


class Run:
    """One run: its moving parts, and what one round does with them."""

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
        self.algorithm = replace(algorithm, participation=algorithm.participation.forced(settings.train))
        self.everyone = torch.arange(federation.n_clients, device=where)
        self.federation = federation.to(where)
        self.n_train = federation.sizes("train").to(where)
        self.task = Task(model).to(where, getattr(torch, settings.dtype))
        self.engine = make_engine(settings.engine, self.task, self.federation)
        shared = self.task.params.without(algorithm.personal.names(model))
        self.server: State = algorithm.server.init(shared, federation.n_clients)
        self.clients = ClientStates.start(self.algorithm, self.task, self.server, self.everyone)
        self.store = RunStore(folder.metrics if folder else None)
        self.record = RoundRecord(0, 0.0, 0, 0, 0, [])
        self.accuracy: float | None = None
        self.deployed: dict[str, tuple[Params, Params]] = {}
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
            watch(Progress(r, self.settings.rounds, self.accuracy, self.record.seconds))
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

    def _round(self, r: int, evaluate: bool) -> None:
        participation, server = self.algorithm.participation, self.algorithm.server
        asked = cohort(self.settings, len(self.everyone), r).to(self.everyone.device)
        ids = asked if participation.train == "cohort" else self.everyone
        up, down = self.record.bytes_up, self.record.bytes_down

        if self.clients.sent is None:
            payload = server.broadcast(self.server, ids)
            self.clients.arrived(ids, payload)
            receivers = asked if participation.receive == "cohort" else self.everyone
            down += payload.nbytes() // len(ids) * len(receivers)
        else:
            payload = self.clients.sent.rows(ids)

        work = self._work(r, TRAINING)
        trained = self.engine.train(self.algorithm.client, ids, self.clients.inputs(ids, payload), work)
        ids, dropped, trained, payload = self._drop_diverged(r, ids, trained, payload)
        if evaluate and not self.algorithm.adapt:
            self._evaluate("trained", r, *self._after_training(ids, trained))
        self.clients.keep(ids, trained)
        steps = self.record.steps + work.count(self.n_train[ids], self.algorithm.client.batches_per_step)

        rows = torch.isin(ids, asked).nonzero().flatten()
        ids = ids[rows]
        if len(ids):
            params = trained.upload.params.without(self.clients.personal)
            upload = trained.upload._replace(params=params).rows(rows)
            up += upload.nbytes()
            self.server = server.aggregate(self.server, ids, payload.rows(rows), upload, self.n_train[ids])
            if self.clients.sent is not None:
                answer = server.broadcast(self.server, ids)
                self.clients.arrived(ids, answer)
                down += answer.nbytes()
        if evaluate:
            self._evaluate_received(r)
            if len(ids) and (matrices := server.mixing(self.server, ids)):
                self.store.add_mixing(r, matrices)
        self.record = RoundRecord(r, self.record.seconds, up, down, steps, dropped)

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
        )

    def _weight_decay(self) -> float:
        given = (self.algorithm.weight_decay, self.settings.weight_decay)
        return next((decay for decay in given if decay is not None), self.algorithm.default_weight_decay)

    def _drop_diverged(
        self, r: int, ids: Tensor, trained: Trained, payload: Payload
    ) -> tuple[Tensor, list[int], Trained, Payload]:
        """Leave out clients whose training is not finite: they keep what they had, and upload nothing."""
        good = trained.finite()
        if good.all():
            return ids, [], trained, payload
        if not good.any():
            self.store.commit()
            raise DivergedError(
                f"round {r}: training diverged on every client that trained ({len(ids)} of them; values are not "
                f"finite); lower the learning rate (lr is {self.settings.lr:g}), or a hyper-parameter that is too large"
            )
        rows = good.nonzero().flatten()
        return ids[rows], ids[~good].tolist(), trained.rows(rows), payload.rows(rows)

    def _after_training(self, ids: Tensor, trained: Trained) -> tuple[Params, Params]:
        """Every client's model after local training, and its buffers; clients that did not train keep theirs."""
        models: Params = vmap(self.algorithm.client.trained_model)(trained.upload, trained.memory)
        if len(ids) == len(self.everyone):
            return models, trained.buffers
        rest = owned(self.clients.models(self.algorithm.client.resting_model, self.everyone, self._send_all))
        return rest.put_rows(ids, models), owned(self.clients.buffers).put_rows(ids, trained.buffers)

    def _send_all(self) -> Payload:
        return self.algorithm.server.broadcast(self.server, self.everyone)

    def _evaluate_received(self, r: int) -> None:
        """Evaluate every client's model after communication; then fine-tuned, where the method does that."""
        models = self.clients.models(self.algorithm.client.received_model, self.everyone, self._send_all)
        self._evaluate("received", r, models, self.clients.buffers)
        if self.algorithm.adapt:
            self._evaluate("trained", r, *self._adapted(models, self.algorithm.adapt, r))

    def _adapted(self, models: Params, adapt: FineTune, r: int) -> tuple[Params, Params]:
        work = self._work(r, ADAPTATION)
        if adapt.steps:
            work = replace(work, steps=adapt.steps, epochs=None)
        work = replace(work, lr=adapt.lr or work.lr, part=adapt.part)
        inputs = Inputs(Payload(models), {}, self.clients.buffers, torch.ones_like(self.clients.fresh))
        done = self.engine.train(SGD(), self.everyone, inputs, work)
        return done.upload.params, done.buffers

    def _evaluate(self, point: Point, r: int, models: Params, buffers: Params) -> None:
        parts: tuple[Literal["test", "validation"], ...] = ("test", "validation")
        for part in parts:
            if self.federation.sizes(part).any():
                scores = self.engine.evaluate(models, buffers, part)
                self.store.add_scores(r, point, part, scores)
                if part == "test" and point == self.algorithm.headline:
                    self.accuracy = float((scores.correct / scores.n).mean())
        self.deployed[point] = (models, buffers)

    def _save(self) -> None:
        self.store.commit()
        if self.folder:
            tree = {"server": self.server, "clients": self.clients.tree()}
            meta = {"record": json.dumps(self.record), "accuracy": json.dumps(self.accuracy)}
            save_tensors(self.folder.checkpoint, tree, meta)

    def _save_models(self) -> None:
        """Write every client's model; before the last checkpoint, which says that this is done."""
        if self.folder:
            models, buffers = self.deployed[self.algorithm.headline]
            if all(v.stride(0) == 0 for v in models.values()):
                models = models.rows(slice(0, 1))
            save_tensors(self.folder.models, {"params": models, "buffers": buffers}, {})

    def _load(self, folder: RunFolder) -> None:
        flat, meta = load_tensors(folder.checkpoint)
        tree = restore({"server": self.server, "clients": self.clients.tree()}, flat)
        self.server = cast(State, tree["server"])
        self.clients.load(tree["clients"])
        self.record = RoundRecord(*json.loads(meta["record"]))
        self.accuracy = json.loads(meta["accuracy"])
        self.store.forget_after(self.record.round)

    def _notes(self) -> list[str]:
        """What a user should know about this run."""
        name = self.config["algorithm"]
        ids = cohort(self.settings, len(self.everyone), self.record.round).to(self.everyone.device)
        remarks = [f"{name}: {remark}" for remark in self.algorithm.server.remarks(self.server, ids)]
        diverged = [record for record in self.store.rounds() if record.dropped]
        if diverged:
            who = sorted({i for record in diverged for i in record.dropped})
            names = ", ".join(self.federation.names[i] for i in who[:5]) + (", ..." if len(who) > 5 else "")
            remarks.append(
                f"{name}: in {len(diverged)} of {self.record.round} rounds training diverged on clients ({names}): "
                "they kept the model they had and uploaded nothing; a lower learning rate would help"
            )
        return [*self.algorithm.notes, *remarks]

    def _result(self, finished: bool) -> Result:
        facts = {
            "headline": self.algorithm.headline,
            "notes": self._notes(),
            "weight_decay": self._weight_decay(),
            "n_parameters": self.task.params.numel(),
            "input_shape": list(self.federation.input_shape),
            "classes": list(self.federation.classes),
            "clients": [
                {
                    "id": c.name,
                    "n_train": len(c.train),
                    "n_validation": len(c.validation),
                    "n_test": len(c.test),
                }
                for c in self.federation.clients
            ],
        }
        models, buffers = self.deployed.get(self.algorithm.headline, (Params(), Params()))
        result = Result(self.config, facts, self.store, finished, models, buffers, self.task.model)
        if self.folder and finished:
            result.finish(self.folder)
            return replace(Result.load(self.folder.path), module=self.task.model)
        return result
