"""The clients of one place: their data, what lives on them, and the engine that trains and evaluates them."""

from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.params import Params
from ...core.payload import Payload
from ...core.settings import Settings
from ...core.task import Task
from ...data import Federation
from ..client_state import ClientStates, Sender
from ..engine import LocalTraining, make_engine
from ..evaluation import ClientModels, LocalEvaluation, PointScores
from ..sampling import ADAPTATION, TRAINING, sample_eval_ids
from ..setup import resolve_weight_decay
from ..storage.rows import RowStack, RowStorage
from .base import Backend, TrainReply, TrainRequest, find_rows

TRAIN_CHUNK_BYTES = 1 << 30
"""Bytes of models that are trained together in one turn, unless more clients than that upload."""


class LocalBackend(Backend):
    """Clients in this process.

    `members` (M,) are their numbers among all clients, by default everybody's; the federation has an entry for all,
    and data for these. `send` gives the first payloads, unless they are to come later. A site that is made anew for
    every round says `lasts=1`, so that the engine prepares for no more.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        task: Task,
        settings: Settings,
        room: RowStorage,
        *,
        members: Tensor | None = None,
        send: Sender | None = None,
        averages_buffers: bool = False,
        lasts: int | None = None,
    ) -> None:
        self.algorithm, self.settings, self.task = algorithm, settings, task
        self.n_clients = federation.n_clients
        self.at_once = max(1, TRAIN_CHUNK_BYTES // max(1, task.params.nbytes()))
        where = federation.device
        self.members = torch.arange(self.n_clients, device=where) if members is None else members
        sizes = federation.sizes("train")[self.members.cpu()]
        cohort = settings.cohort_size(self.n_clients)
        steps = (
            settings.all_steps(float(sizes.double().mean())) // settings.rounds * (lasts or settings.rounds)
        )
        self.engine = make_engine(
            settings.engine,
            task,
            federation,
            steps=steps,
            cohort=min(cohort, len(self.members)),
        )
        own_buffers = None
        if algorithm.network:
            counts = torch.from_numpy(federation.label_counts("train")).to(where, self.engine.dtype)
            own_buffers = algorithm.network.client_buffers(counts[self.members])
        self.clients = ClientStates.start(
            algorithm,
            task,
            send,
            self.members,
            room,
            averaged=task.bn_statistics if averages_buffers else (),
            own_buffers=own_buffers,
        )
        judged = sample_eval_ids(settings, federation).to(where)
        mine = judged[torch.isin(judged, self.members)]
        self.evaluation = LocalEvaluation(algorithm, self.engine, federation, self.clients, mine)
        self._models: list[ClientModels] = []

    @property
    def personal(self) -> Params:
        """The tensors that never leave a client, of one client."""
        return self.clients.personal.rows(0)

    @property
    def common(self) -> Params:
        """The averaged BatchNorm statistics that clients are sent."""
        return self.clients.common

    @common.setter
    def common(self, new: Params) -> None:
        self.clients.common = new

    @property
    def deployed(self) -> tuple[RowStack, RowStack]:
        """Models and buffers that were evaluated last at the headline point."""
        return self.evaluation.deployed

    def arrived(self, ids: Tensor, payload: Payload) -> None:
        """Give clients `ids` what the server answers to their uploads."""
        self.clients.arrived(ids, payload)

    def train(self, order: TrainRequest, payload: Payload | None, send: Sender) -> TrainReply:
        """Train clients, and keep what is theirs."""
        ids = order.ids
        if payload is None:
            assert self.clients.sent is not None
            payload = self.clients.sent.rows(self.clients.at(ids))
        else:
            self.clients.arrived(ids, payload)
        if len(order.away):  # nothing of their round is kept, so it need not be computed
            here = (~torch.isin(ids, order.away)).nonzero().flatten()
            ids, payload = ids[here], payload.rows(here)
        if not len(ids):
            return TrainReply(ids, payload, payload, Params())
        inputs = self.clients.inputs(ids, payload, torch.isin(ids, order.asked) & order.learns)
        trained = self.engine.train(self.algorithm.client, ids, inputs, self.work(order.round, TRAINING))
        good, steps = trained.find_finite(), int(trained.n_steps.sum())
        dropped = ids[~good].tolist()
        if dropped:  # they keep what they had, and upload nothing
            rows = good.nonzero().flatten()
            ids, trained, payload = ids[rows], trained.rows(rows), payload.rows(rows)
        if order.evaluate and len(ids) and (models := self.evaluation.of_trained(ids, trained)):
            self._models.append(models)
        if len(ids):
            self.clients.keep(ids, trained)
        n_trained, uploading = len(ids), find_rows(ids, order.asked, self.n_clients)
        if uploading is not None:
            ids, payload, trained = ids[uploading], payload.rows(uploading), trained.rows(uploading)
        upload = trained.upload._replace(params=trained.upload.params.without(self.clients.personal))
        buffers = trained.buffers.only(self.common)
        return TrainReply(ids, payload, upload, buffers, n_trained, steps, dropped)

    def trained(self, r: int, send: Sender) -> list[PointScores]:
        """The scores after the local training of round r."""
        done, self._models = self._models, []
        return self.evaluation.trained(done, send)

    def received(
        self, r: int, send: Sender, w: Params | None, mean_buffers: Params | None = None
    ) -> list[PointScores]:
        """The scores after the communication of round r, and those of the global model w, if there is one."""
        work, adaptation = self.work(r + 1, TRAINING), self.work(r, ADAPTATION)
        return self.evaluation.received(send, w, work, adaptation, mean_buffers)

    def work(self, r: int, stream: int) -> LocalTraining:
        """What a client does in round r."""
        settings = self.settings
        return LocalTraining(
            seed=settings.seed,
            stream=stream,
            round=r,
            lr=settings.lr,
            batch_size=settings.batch_size,
            steps=settings.local_steps,
            epochs=settings.epochs,
            weight_decay=resolve_weight_decay(self.algorithm, settings),
            drop_last=self.task.uses_batch_statistics,
            cohort=settings.cohort_size(self.n_clients),
            personal=tuple(self.clients.personal),
        )

    def tree(self) -> dict[str, Any]:
        """What a checkpoint holds of the clients."""
        return self.clients.tree()

    def load(self, tree: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.clients.load(tree)
