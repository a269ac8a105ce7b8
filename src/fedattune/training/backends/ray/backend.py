"""Run clients on actors of Ray: each actor holds some clients, and lost actors are replaced."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...._version import __version__
from ....core.errors import RunError, list_some
from ....core.hardware import balance
from ....core.own_code import list_loaded_modules
from ....core.params import Params
from ....core.payload import Payload
from ....data import Federation
from ....data.combine import select_samples
from ...client_state import PayloadFactory
from ...context import RunContext
from ...storage.rows import RowStack
from ..base import TrainReply, TrainRequest
from ..message import WorkerMessage
from ..remote import RemoteBackend
from .actor import ActorState, RayMessage, pack_federation, pack_messages, to_tensors
from .cluster import RayCluster, summarize_actor_error

MAX_LOST_ACTORS = 3
"""Actors that one message may lose in a row; then the run fails."""

START_TIMEOUT_S = 300.0
"""Seconds within which the cluster must start an actor and restore its clients."""

MAX_UNSAVED_BYTES = 1 << 28
"""Bytes of messages between two saved states, unless the clients' state is larger."""

MIN_UNSAVED_S, MAX_SAVING_SHARE = 1.0, 0.1
"""Least seconds between two saved states, and the largest share of time that saving may take."""


class RayBackend(RemoteBackend):
    """Run clients on actors, and replace lost actors.

    Ray's object store holds a saved state of the clients, renewed with every checkpoint and now and then between. If an
    actor is lost, another one restores the saved state and handles the messages since then again. It reaches the same
    state, since seed, round and client determine everything that clients do.
    """

    def __init__(self, context: RunContext, cluster: RayCluster, make_payload: PayloadFactory) -> None:
        n = cluster.count_actors(context.settings, context.federation.n_clients)
        groups = balance(estimate_loads(context), n)
        super().__init__(
            context, [torch.tensor(sorted(ids), device=context.device) for ids in groups], make_payload
        )
        self.cluster, self.ray = cluster, cluster.ray
        self.threads = cluster.count_threads(n)
        self.actor_states = [ActorState(members) for members in self.worker_clients]
        self.n_lost = 0
        self._model = context.task.model
        self._saved_at, self._saving_took, self._saved_bytes = time.monotonic(), 0.0, 0
        self._headline_models: tuple[Params, Params] | None = None
        for state in self.actor_states:
            self._start(state)
        for state in self.actor_states:
            with suppress(self.ray.exceptions.RayError):  # the first message to a lost actor finds it
                self._open(state)

    @property
    def headline_models(self) -> tuple[RowStack, RowStack]:
        """Models and buffers of the last evaluation at the headline point, from all actors."""
        if self._headline_models is None:
            self._headline_models = merge_models(self.send_to_evaluated(kind="models"))
        return self._headline_models

    def train(
        self, request: TrainRequest, payload: Payload | None, make_payload: PayloadFactory
    ) -> TrainReply:
        """Train clients on all actors at the same time; save their state before, if it is due."""
        self._headline_models = None
        now = time.monotonic()
        limit = max(MAX_UNSAVED_BYTES, self._saved_bytes) / len(self.actor_states)
        is_late = now - self._saved_at > max(MIN_UNSAVED_S, self._saving_took / MAX_SAVING_SHARE)
        if is_late or max(state.nbytes for state in self.actor_states) > limit:
            self.send_to_all(kind="state", load=False)
            self._saving_took = time.monotonic() - now
        return super().train(request, payload, make_payload)

    def keep_models(self, ids: Tensor) -> None:
        """Let the actors keep the models of clients `ids`."""
        self._headline_models = None
        super().keep_models(ids)

    def exchange(self, messages: Mapping[int, WorkerMessage]) -> dict[int, WorkerMessage | str]:
        """Send each actor its message; replace lost actors, until all have answered.

        Raises:
            RunError: an actor is lost too often, or cannot be started.
        """
        packed = pack_messages(self.ray, messages)
        replies: dict[int, WorkerMessage | str] = {}
        lost: dict[int, Exception] = {}
        for _ in range(MAX_LOST_ACTORS):
            calls = {w: self._submit(self.actor_states[w], packed[w]) for w in packed if w not in replies}
            lost = {}
            for worker, call in calls.items():
                try:
                    self._open(self.actor_states[worker])
                    head, arrays = self._get(call)
                except self.ray.exceptions.RayError as error:
                    lost[worker] = error
                    continue
                reply = WorkerMessage(head, to_tensors(arrays)).to(self.context.device)
                self._record(worker, packed[worker], reply)
                replies[worker] = reply
            if not lost:
                return replies
            for worker in lost:
                self._drop(self.actor_states[worker])
        worker, last = next(iter(lost.items()))
        raise RunError(self._describe_loss(worker, packed[worker], last)) from last

    def _record(self, worker: int, message: RayMessage, reply: WorkerMessage) -> None:
        """Record everything that restores the clients' state after a message."""
        state = self.actor_states[worker]
        if message.head["kind"] != "state":
            state.record(message)
        elif message.head["load"]:
            state.mark_saved(message)
        else:
            state.mark_saved(self._pack_state(worker, reply))
            self._saved_at = time.monotonic()
            self._saved_bytes = sum(one.saved.nbytes for one in self.actor_states if one.saved)

    def _pack_state(self, worker: int, reply: WorkerMessage) -> RayMessage:
        """Make the message that restores a state, with the last payloads of the clients, if they keep these."""
        members = self.worker_clients[worker]
        message = WorkerMessage({"kind": "state", "load": True}, dict(reply.tensors))
        message.put("statistics", self.statistics)
        if self.sent is not None:
            message.head.update(pending=members.tolist(), pending_first=[True] * len(members))
            message.put("pending", self.sent.rows(members))
        return pack_messages(self.ray, {worker: message})[worker]

    def _start(self, state: ActorState) -> None:
        """Start an actor, and restore its clients."""
        context, settings = self.context, self.context.settings
        assert isinstance(context.federation, Federation)
        data = select_samples(context.federation, state.members.cpu().numpy()).to(torch.device("cpu"))
        if not settings.ray_gpus:
            settings = settings.model_copy(update={"device": "cpu"})
        actor = state.actor = self.cluster.acquire(settings.ray_gpus)
        members = state.members.tolist()
        for module in list_loaded_modules():  # the actor's machine may lack the user's files
            self.ray.cloudpickle.register_pickle_by_value(module)
        opening = actor.open.remote(
            context.algorithm, pack_federation(data), self._model, settings, members, self.threads
        )
        messages = [state.saved, *state.log] if state.saved else state.log
        state.opening = [opening, *(actor.redo.remote(*message[:4]) for message in messages)]

    def _submit(self, state: ActorState, message: RayMessage) -> Any:
        """Send a message to an actor, and return the pending reply."""
        if state.actor is None:
            self._start(state)
        return state.actor.serve.remote(*message[:4])

    def _open(self, state: ActorState) -> None:
        """Wait until an actor has restored its clients."""
        if not state.opening:
            return
        try:
            version, state.pid = self._get(state.opening[0], timeout=START_TIMEOUT_S)
        except self.ray.exceptions.GetTimeoutError as error:
            has = self.ray.cluster_resources()
            raise RunError(
                f"engine ray: no machine of the cluster started an actor with {self.context.settings.ray_gpus:g} of a "
                f"GPU within {START_TIMEOUT_S:.0f} s; the cluster has {has.get('CPU', 0):g} CPUs and "
                f"{has.get('GPU', 0):g} GPUs; ask for fewer actors, or free some of its resources"
            ) from error
        if version != __version__:
            raise RunError(
                f"engine ray: an actor has FedAttune {version}, and this process {__version__}; install the same "
                "version on all machines of the cluster"
            )
        self._get(state.opening[1:])
        state.opening = []

    def _get(self, call: Any, timeout: float | None = None) -> Any:
        """Return the result of a call; raise errors of the actor's code as they are."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(call, timeout=timeout)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            if cause is None or isinstance(cause, errors.RayError):
                raise
            cause.add_note(f"on an actor of Ray:\n{error}")
            raise cause from None

    def _drop(self, state: ActorState) -> None:
        """Give up a lost actor."""
        self.cluster.kill(state.actor)
        state.actor, state.opening = None, []
        self.n_lost += 1

    def _describe_loss(self, worker: int, message: RayMessage, error: Exception) -> str:
        ids = self.worker_clients[worker].tolist()
        some = list_some([str(i) for i in ids], 5)
        at = f", round {message.head['round']}" if "round" in message.head else ""
        return (
            f"engine ray: lost {MAX_LOST_ACTORS} actors in a row with clients {some} ({message.head['kind']}{at}): "
            f"{summarize_actor_error(error)}; check whether they run out of memory, or the model or method ends its "
            "process"
        )

    def release(self, *, at_once: bool) -> None:
        """Release the actors for other runs; `at_once` kills them, since they may be busy."""
        for state in self.actor_states:
            if state.actor is not None:
                (self.cluster.kill if at_once else self.cluster.release)(state.actor)
            state.actor = None


def estimate_loads(context: RunContext) -> list[float]:
    """Estimate the work of a round for each client: its training samples, and a third of its evaluation samples."""
    settings, sizes = context.settings, context.federation.sizes
    train = sizes("train").double()
    batch = train.clamp_max(settings.batch_size)
    trained = train * settings.epochs if settings.epochs else batch * (settings.local_steps or 0)
    loads: list[float] = (
        trained + (sizes("test") + sizes("validation")).double() / settings.eval_every / 3
    ).tolist()
    return loads


def merge_models(replies: Sequence[WorkerMessage]) -> tuple[Params, Params]:
    """Merge the models and buffers of all actors, sorted by client; one model for all clients stays one."""
    full = [reply for reply in replies if reply.get("params")]
    if len(full) < len(replies):
        return Params(), Params()  # nothing was evaluated yet
    order = torch.tensor([i for reply in full for i in reply.head["ids"]]).argsort()

    def merge(name: str) -> Params:
        pieces = [reply.get(name) for reply in full]
        return Params({k: _merge_tensor([piece[k] for piece in pieces], order) for k in pieces[0]})

    return merge("params"), merge("buffers")


def _merge_tensor(pieces: list[Tensor], order: Tensor) -> Tensor:
    one = pieces[0][:1]
    if all((len(v) == 1 or v.stride(0) == 0) and torch.equal(v[:1], one) for v in pieces):
        return one.expand(len(order), *one.shape[1:])
    return torch.cat(pieces)[order.to(one.device)]
