"""Run clients on actors of Ray: each actor holds some clients."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...._version import __version__
from ....core.errors import RunError, list_some
from ....core.hardware import balance
from ....core.own_code import list_loaded_modules
from ....data import Federation
from ....data.federated import select_samples
from ....runs.context import RunContext
from ..message import WorkerMessage
from ..remote import Group, Outcome
from .actor import RayMessage, pack_federation, pack_messages, to_tensors
from .cluster import RayCluster, summarize_actor_error

START_TIMEOUT_S = 300.0
"""Seconds within which the cluster must start an actor."""


class RayTransport:
    """Carry messages to actors. A lost actor ends the run, and `--resume` continues after the last checkpoint."""

    def __init__(self, context: RunContext, cluster: RayCluster) -> None:
        assert context.settings.execution.ray is not None
        self.options = context.settings.execution.ray
        n = cluster.count_actors(self.options, context.federation.n_clients)
        groups = balance(estimate_loads(context), n)
        self.context, self.cluster, self.ray = context, cluster, cluster.ray
        self.worker_clients = [torch.tensor(sorted(ids), device=context.device) for ids in groups]
        self.threads = cluster.count_threads(n)
        self.actors: list[Any] = []
        openings = [self._start(members) for members in self.worker_clients]
        for worker, opening in enumerate(openings):
            self._open(worker, opening)

    def exchange(self, groups: Sequence[Group]) -> list[Outcome]:
        return [Outcome(self._exchange(group)) for group in groups]

    def _exchange(self, messages: Group) -> dict[int, WorkerMessage]:
        if not messages:
            return {}
        packed = pack_messages(self.ray, messages)
        calls = {w: self._submit(w, message) for w, message in packed.items()}
        replies: dict[int, WorkerMessage] = {}
        for worker, call in sorted(calls.items()):
            try:
                head, arrays = self._get(call)
            except self.ray.exceptions.RayError as error:
                raise RunError(self._describe_loss(worker, packed[worker].head, error)) from error
            replies[worker] = WorkerMessage(head, to_tensors(arrays)).to(self.context.device)
        return replies

    def _start(self, members: Tensor) -> Any:
        context, settings = self.context, self.context.settings
        assert isinstance(context.federation, Federation)
        data = select_samples(context.federation, members.cpu().numpy()).to(torch.device("cpu"))
        if not self.options.gpus:
            settings = settings.replace(device="cpu")
        self.actors.append(actor := self.cluster.acquire(self.options.gpus))
        for module in list_loaded_modules():  # the actor's machine may lack the user's files
            self.ray.cloudpickle.register_pickle_by_value(module)
        return actor.open.remote(
            context.algorithm, pack_federation(data), context.task.model, settings, members.tolist(), self.threads
        )

    def _submit(self, worker: int, message: RayMessage) -> Any:
        return self.actors[worker].serve.remote(*message)

    def _open(self, worker: int, opening: Any) -> None:
        try:
            version = self._get(opening, timeout=START_TIMEOUT_S)
        except self.ray.exceptions.GetTimeoutError as error:
            has = self.ray.cluster_resources()
            raise RunError(
                f"engine ray: no machine of the cluster started an actor with {self.options.gpus:g} of a "
                f"GPU within {START_TIMEOUT_S:.0f} s; the cluster has {has.get('CPU', 0):g} CPUs and "
                f"{has.get('GPU', 0):g} GPUs; ask for fewer actors, or free some of its resources"
            ) from error
        except self.ray.exceptions.RayError as error:
            raise RunError(self._describe_loss(worker, {"kind": "start"}, error)) from error
        if version != __version__:
            raise RunError(
                f"engine ray: an actor has FedAttune {version}, and this process {__version__}; install the same "
                "version on all machines of the cluster"
            )

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

    def _describe_loss(self, worker: int, head: Mapping[str, Any], error: Exception) -> str:
        ids = self.worker_clients[worker].tolist()
        some = list_some([str(i) for i in ids], 5)
        at = f", round {head['round']}" if "round" in head else ""
        return (
            f"engine ray: lost the actor with clients {some} ({head['kind']}{at}): {summarize_actor_error(error)}; "
            "check whether its machine is up, it ran out of memory, or the model or method ends its process; then "
            "--resume continues after the last checkpoint"
        )

    def release(self, *, at_once: bool) -> None:
        """Release the actors for other runs; `at_once` kills them, since they may be busy or lost."""
        for actor in self.actors:
            (self.cluster.kill if at_once else self.cluster.release)(actor)


def estimate_loads(context: RunContext) -> list[float]:
    """Estimate the work of a round for each client: its training samples, and a third of its evaluation samples."""
    settings, sizes = context.settings, context.federation.sizes
    training, rows = settings.training, sizes("train").double()
    steps = rows.clamp_max(training.batch_size) * (training.local_steps or 0)
    scored = (sizes("test") + sizes("validation")).double() / settings.eval_every / 3
    loads: list[float] = ((rows * training.epochs if training.epochs else steps) + scored).tolist()
    return loads
