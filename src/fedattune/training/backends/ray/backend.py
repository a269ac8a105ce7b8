"""Clients on actors of Ray: each actor holds some of them; what is lost with an actor is made again.

Which clients go to which actor, and how their models come together again.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...._version import __version__
from ....core.errors import RunError
from ....core.params import Params
from ....core.payload import Payload
from ....data import Federation
from ....data.combine import select_samples
from ...client_state import Sender
from ...context import RunContext
from ...storage.rows import RowStack
from ..base import TrainReply, TrainRequest
from ..message import WorkerMessage
from ..remote import RemoteBackend
from .actor import ActorState, RayMessage, pack_federation, pack_messages, to_tensors
from .cluster import RayCluster, summarize_actor_error


def estimate_loads(context: RunContext) -> np.ndarray[Any, Any]:
    """How much there is to do for each client in a round: samples that it trains on, and a third of those scored."""
    settings, sizes = context.settings, context.federation.sizes
    train = sizes("train").double().numpy()
    batch = np.minimum(train, settings.batch_size)
    trained = train * settings.epochs if settings.epochs else batch * (settings.local_steps or 0)
    scored = (sizes("test") + sizes("validation")).double().numpy() / settings.eval_every
    return np.asarray(trained + scored / 3)


def divide_clients(burden: np.ndarray[Any, Any], n: int) -> list[Tensor]:
    """Clients divided among n actors, so that all have about as much to do: the largest first, to who has least."""
    loads = [(0.0, 0, s) for s in range(n)]
    heapify(loads)
    whose = np.empty(len(burden), dtype=np.int64)
    for i in np.argsort(-burden, kind="stable"):
        load, count, s = loads[0]
        whose[i] = s
        heapreplace(loads, (load + float(burden[i]), count + 1, s))
    return [torch.from_numpy(np.flatnonzero(whose == s)) for s in range(n)]


def merge_models(replies: Sequence[WorkerMessage]) -> tuple[Params, Params]:
    """Models and buffers of all sites, sorted by client; a tensor that is one for all stays one."""
    full = [reply for reply in replies if reply.get("params")]
    if len(full) < len(replies):
        return Params(), Params()  # nothing was evaluated yet
    order = torch.tensor([i for reply in full for i in reply.head["ids"]]).argsort()

    def joint(name: str) -> Params:
        pieces = [reply.get(name) for reply in full]
        return Params({k: _merge_tensor([piece[k] for piece in pieces], order) for k in pieces[0]})

    return joint("params"), joint("buffers")


def _merge_tensor(pieces: list[Tensor], order: Tensor) -> Tensor:
    one = pieces[0][:1]
    if all((len(v) == 1 or v.stride(0) == 0) and torch.equal(v[:1], one) for v in pieces):
        return one.expand(len(order), *one.shape[1:])
    return torch.cat(pieces)[order.to(one.device)]


MAX_LOST_ACTORS = 3
"""Actors that may be lost in a row over one parcel: then it is the parcel that ends them."""


START_TIMEOUT_S = 300.0
"""Seconds within which a cluster must have had room for an actor, and the actor its clients."""


MAX_UNSAVED_BYTES = 1 << 28
"""Bytes that are sent between two savings at most, unless the clients' state takes more."""


MIN_UNSAVED_S, MAX_SAVING_SHARE = 1.0, 0.1
"""Seconds between two savings at least, and the share of time that they may take."""


class RayBackend(RemoteBackend):
    """Clients on actors.

    Their state is saved in Ray's store on the driver's side now and then, and with every checkpoint. Where an actor
    is gone, another one takes its clients as they were saved, is told again what they were told since, and so
    comes to where the other one was: what clients do depends on nothing else.
    """

    def __init__(self, context: RunContext, cluster: RayCluster, send: Sender) -> None:
        n = cluster.count_actors(context.settings, context.federation.n_clients)
        workers = divide_clients(estimate_loads(context), n)
        super().__init__(context, [ids.to(context.device) for ids in workers], send)
        self.cluster, self.ray = cluster, cluster.ray
        self.threads = cluster.count_threads(n)
        self.shards = [ActorState(members) for members in self.workers]
        self.lost = 0
        self._model = context.task.model
        self._saved_at, self._saving_took, self._saved_bytes = time.monotonic(), 0.0, 0
        self._headline_models: tuple[Params, Params] | None = None
        for shard in self.shards:
            self._start(shard)
        for shard in self.shards:
            with suppress(
                self.ray.exceptions.RayError
            ):  # who is gone already is found when it is asked something
                self._open(shard)

    @property
    def headline_models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers that were evaluated last at the headline point, gathered from all actors."""
        if self._headline_models is None:
            self._headline_models = merge_models(self.request_evaluated(kind="models"))
        return self._headline_models

    def actors(self) -> list[Any]:
        """The actors that are there."""
        return [shard.actor for shard in self.shards if shard.actor is not None]

    def train(self, order: TrainRequest, payload: Payload | None, send: Sender) -> TrainReply:
        """Train clients on all actors at the same time; before, save them if it is time to."""
        self._headline_models = None
        now = time.monotonic()
        unsafe = max(shard.nbytes for shard in self.shards)
        limit = max(MAX_UNSAVED_BYTES, self._saved_bytes) / len(self.shards)
        if now - self._saved_at > max(MIN_UNSAVED_S, self._saving_took / MAX_SAVING_SHARE) or unsafe > limit:
            self.request_all(kind="state", load=False)
            self._saving_took = time.monotonic() - now
        return super().train(order, payload, send)

    def exchange(self, parcels: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each actor its parcel; actors that are gone are replaced, until all have answered.

        Raises:
            RunError: an actor was lost too often, or could not be started.

        """
        crates = pack_messages(self.ray, parcels)
        replies: dict[int, WorkerMessage | str] = {}
        lost: dict[int, Exception] = {}
        for _ in range(MAX_LOST_ACTORS):
            left = [s for s in crates if s not in replies]
            calls = {s: self._submit(self.shards[s], crates[s]) for s in left}
            lost = {}
            for s, call in calls.items():
                try:
                    head, found = self._result(call)
                except self.ray.exceptions.RayError as error:
                    lost[s] = error
                    continue
                replies[s] = WorkerMessage(head, to_tensors(found)).to(self.context.device)
                self._note(s, crates[s], replies[s])
            if not lost:
                return replies
            for s in lost:
                self._lose(self.shards[s])
        s, last = next(iter(lost.items()))
        raise RunError(self._hopeless(s, crates[s], last)) from last

    def _note(self, s: int, crate: RayMessage, reply: WorkerMessage | str) -> None:
        """Remember what brings the clients back to where they are now."""
        if crate.head["kind"] != "state":
            self.shards[s].note(crate)
        elif crate.head["load"]:
            self.shards[s].save(crate)
        else:
            assert isinstance(reply, WorkerMessage)
            self.shards[s].save(self._keeping(s, reply))
            self._saved_at = time.monotonic()
            self._saved_bytes = sum(shard.saved.nbytes for shard in self.shards if shard.saved)

    def _keeping(self, s: int, state: WorkerMessage) -> RayMessage:
        """What brings clients to a state that was asked for, with what they were last sent, if they keep that."""
        members = self.workers[s]
        parcel = WorkerMessage({"kind": "state", "load": True}, dict(state.tensors))
        parcel.put("statistics", self.statistics)
        if self.sent is not None:
            parcel.head.update(pending=members.tolist(), pending_first=[True] * len(members))
            parcel.put("pending", self.sent.rows(members))
        return pack_messages(self.ray, {s: parcel})[s]

    def _start(self, shard: ActorState) -> None:
        """Give a shard an actor, and bring its clients to where they were."""
        context, settings = self.context, self.context.settings
        assert isinstance(context.federation, Federation)
        data = select_samples(context.federation, shard.members.cpu().numpy()).to(torch.device("cpu"))
        if not settings.ray_gpus:
            settings = settings.model_copy(update={"device": "cpu"})
        actor = shard.actor = self.cluster.acquire(settings.ray_gpus)
        opening = actor.open.remote(
            context.algorithm,
            pack_federation(data),
            self._model,
            settings,
            shard.members.tolist(),
            self.threads,
        )
        saved = [] if shard.saved is None else [shard.saved]
        shard.before = [opening, *(actor.redo.remote(*crate[:4]) for crate in [*saved, *shard.since])]

    def _submit(self, shard: ActorState, crate: RayMessage) -> tuple[ActorState, Any]:
        if shard.actor is None:
            self._start(shard)
        return shard, shard.actor.serve.remote(*crate[:4])

    def _result(self, call: tuple[ActorState, Any]) -> Any:
        """What an actor answers, once it has its clients; what is raised there is raised here."""
        shard, answer = call
        self._open(shard)
        return self._get(answer)

    def _open(self, shard: ActorState) -> None:
        """Wait until an actor has its clients where they were."""
        if not shard.before:
            return
        try:
            version, shard.pid = self._get(shard.before[0], timeout=START_TIMEOUT_S)
        except self.ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"engine ray: for {START_TIMEOUT_S:.0f} s, no machine of the cluster had room for an actor with "
                f"{self.context.settings.ray_gpus:g} of a GPU, or could start it; it has {self._resources()}"
            ) from error
        if version != __version__:
            raise RunError(
                f"engine ray: an actor has FedAttune {version}, and this process {__version__}; install the same "
                "version on all machines of the cluster"
            )
        self._get(shard.before[1:])
        shard.before = []

    def _get(self, answer: Any, timeout: float | None = None) -> Any:
        """What an actor answers; what is raised there is raised here."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=timeout)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            if cause is None or isinstance(cause, errors.RayError):
                raise
            cause.add_note(f"on an actor of Ray:\n{error}")
            raise cause from None

    def _resources(self) -> str:
        has = self.ray.cluster_resources()
        return f"{has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"

    def _lose(self, shard: ActorState) -> None:
        """Let go of an actor that is gone, or cannot be reached."""
        self.cluster.kill(shard.actor)
        shard.actor, shard.before = None, []
        self.lost += 1

    def _hopeless(self, s: int, crate: RayMessage, error: Exception) -> str:
        ids = self.workers[s].tolist()
        some = ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")
        at = f", round {crate.head['round']}" if "round" in crate.head else ""
        return (
            f"engine ray: {MAX_LOST_ACTORS} actors in a row were lost with clients {some} ({crate.head['kind']}{at}): "
            f"{summarize_actor_error(error)}; look whether they run out of memory "
            "or the model or method ends its process"
        )

    def leave(self, *, at_once: bool) -> None:
        """Let the actors go; where they may be busy still, end them `at_once`."""
        for shard in self.shards:
            if shard.actor is not None:
                (self.cluster.kill if at_once else self.cluster.release)(shard.actor)
            shard.actor = None
