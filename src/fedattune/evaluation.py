"""Where a round is evaluated: trained (after local training), received (after communication), and the global model."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from .client import SGD
from .clients import ClientStates, owned
from .core import Algorithm, FineTune, Payload, State
from .data import Federation
from .engines import Engine, Inputs, Scores, Trained, Work
from .params import Params, concatenate
from .runs import RunStore

AT_ONCE = 32
"""Clients whose received models are made together where that takes a look at data."""

PARTS: tuple[Literal["test", "validation"], ...] = ("test", "validation")


@dataclass
class Evaluation:
    """Evaluates every client at the two points and keeps the models that it evaluated last.

    Attributes:
        accuracy: mean test accuracy at the headline point, at the last evaluation.
        deployed: point -> models (N, ...) and buffers that were evaluated last.

    """

    algorithm: Algorithm
    engine: Engine
    federation: Federation
    clients: ClientStates
    store: RunStore
    everyone: Tensor
    accuracy: float | None = None
    deployed: dict[str, tuple[Params, Params]] = field(default_factory=dict)

    def trained(self, r: int, ids: Tensor, trained: Trained | None, server: State) -> None:
        """Evaluate every client's model after local training; clients that did not train rest."""
        if self.algorithm.adapt:
            return  # then `trained` is the received model after fine-tuning
        if trained is None:
            models, buffers = self._resting(server), self.clients.buffers
        else:
            models = vmap(self.algorithm.client.trained_model)(trained.upload, trained.memory)
            buffers = trained.buffers
            if len(ids) < len(self.everyone):
                models = self._resting(server).put_rows(ids, models)
                buffers = owned(self.clients.buffers).put_rows(ids, buffers)
        self._score("trained", r, models, buffers)

    def received(self, r: int, server: State, training: Work, adaptation: Work) -> None:
        """Evaluate every client's model after communication; then fine-tuned, where the method does that.

        `training` is the work of the next round, `adaptation` that of this round's fine-tuning.
        """
        buffers = self.clients.received_buffers()
        if self.algorithm.client.ready_after_probe:
            models = self._probed(server, training, buffers)
        else:
            models = self.clients.models(
                self.algorithm.client.received_model, self.everyone, lambda: self._send_all(server)
            )
        test = self._score("received", r, models, buffers)
        self._global(r, server, models, test)
        if self.algorithm.adapt:
            self._score("trained", r, *self._adapted(models, buffers, self.algorithm.adapt, adaptation))

    def _resting(self, server: State) -> Params:
        rule = self.algorithm.client.resting_model
        return owned(self.clients.models(rule, self.everyone, lambda: self._send_all(server)))

    def _send_all(self, server: State) -> Payload:
        return self.algorithm.server.broadcast(server, self.everyone)

    def _probed(self, server: State, work: Work, buffers: Params) -> Params:
        """Every client's model as its next round would begin with it."""
        rule, work = self.algorithm.client, replace(work, steps=0, epochs=None)
        models = []
        for ids in torch.split(self.everyone, AT_ONCE):  # what is sent can be many models for each
            kept = self.clients.sent
            sent = self.algorithm.server.broadcast(server, ids) if kept is None else kept.rows(ids)
            inputs = self.clients.inputs(ids, sent, torch.zeros_like(ids, dtype=torch.bool))
            done = self.engine.train(rule, ids, inputs._replace(buffers=buffers.rows(ids)), work)
            models.append(vmap(rule.trained_model)(done.upload, done.memory))
        return concatenate(models)

    def _adapted(self, models: Params, buffers: Params, adapt: FineTune, work: Work) -> tuple[Params, Params]:
        if adapt.steps:
            work = replace(work, steps=adapt.steps, epochs=None)
        work = replace(work, lr=adapt.lr or work.lr, part=adapt.part)
        yes = torch.ones_like(self.clients.fresh)
        inputs = Inputs(Payload(models), {}, buffers, yes, ~yes)
        done = self.engine.train(SGD(), self.everyone, inputs, work)
        return done.upload.params, done.buffers

    def _global(self, r: int, server: State, received: Params, scores: Scores | None) -> None:
        """Evaluate the one global model, if there is one, on every client's test part."""
        network, personal = self.algorithm.network, self.clients.personal
        w = self.algorithm.server.global_model(server)
        if w is None or scores is None or (personal and not (network and network.generic)):
            return
        whole = Params({k: w[k] if k in w else torch.zeros_like(personal[k][0]) for k in self.clients.names})
        if not all(v.stride(0) == 0 for v in received.values()) or self.clients.buffers:
            # Without shared statistics, those of the clients' mean stand in.
            buffers = self.clients.received_buffers().map(lambda b: b.double().mean(0).to(b.dtype))
            n = len(self.everyone)
            scores = self.engine.evaluate(whole.repeat(n), buffers.repeat(n), "test")
        self.store.add_scores(r, "global", "test", scores)

    def _score(
        self, point: Literal["received", "trained"], r: int, models: Params, buffers: Params
    ) -> Scores | None:
        """Store the scores of one point on both parts; those on the test part."""
        self.deployed[point] = (models, buffers)
        test = None
        for part in PARTS:
            if self.federation.sizes(part).any():
                scores = self.engine.evaluate(models, buffers, part)
                self.store.add_scores(r, point, part, scores)
                test = scores if part == "test" else test
        if test is not None and point == self.algorithm.headline:
            self.accuracy = float((test.correct / test.n).mean())
        return test
