"""Connect this process to Ray, and keep its actors."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch

from ....core.errors import ConfigError, RunError, summarize_error
from ....core.settings import Ray, Settings

CONNECT_TIMEOUT_S = 5.0
"""Seconds within which an address must answer."""

ACTOR_CPUS = 0.001
"""CPUs that an actor requests: nearly none, so that an actor always finds room. Its threads are set separately."""

QUIET_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment in which Ray neither reports usage nor warns about actors without a GPU."""

FAIL_FAST_ENV = {
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
}
"""Environment in which Ray gives up within seconds if a cluster does not answer."""

_connections: "list[RayCluster]" = []
"""The connection of this process, while it is open."""


def check_ray(settings: Settings) -> None:
    """Check that Ray is installed and the cluster answers, if the settings need them; start nothing."""
    ray = settings.execution.ray
    if ray is None:
        return
    if find_spec("ray") is None:
        raise ConfigError("engine: got 'ray', but the package ray is not installed; run pip install 'fedattune[ray]'")
    if settings.execution.device == "cuda" and not ray.gpus:
        raise ConfigError(
            "device: got 'cuda' with engine ray, but actors have no GPU unless ray_gpus gives the share of a "
            "GPU for each; give --ray-gpus 1, or leave the device at auto"
        )
    if not _connections and (address := _address(ray)):
        _check_address(address)


def _address(ray: Ray) -> str | None:
    """Return the address of the cluster to join; None for a cluster of this machine alone."""
    address = ray.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def _check_address(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"ray_address: nothing answers at {address} ({why}); expected the address that "
            "`ray start --head` prints on the first machine of the cluster, such as 192.0.2.7:6379"
        ) from error


@contextmanager
def connect_ray(settings: Settings) -> "Iterator[RayCluster]":
    """Connect to Ray: reuse the connection of an outer block or of the user's `ray.init`, or open a new one.

    At the end of the block, the actors end, and so does Ray if this block started it.
    """
    check_ray(settings)
    if _connections:
        yield _connections[-1]
        return
    assert settings.execution.ray is not None
    cluster = RayCluster(_address(settings.execution.ray))
    _connections.append(cluster)
    try:
        yield cluster
    finally:
        _connections.remove(cluster)
        cluster.close()


class RayCluster:
    """The connection to Ray, and a pool of actors: to start an actor takes seconds."""

    def __init__(self, address: str | None) -> None:
        for name, value in {**QUIET_ENV, **(FAIL_FAST_ENV if address else {})}.items():
            os.environ.setdefault(name, value)  # Ray reads these on import
        import ray

        self.ray: Any = ray
        self._is_ours = not ray.is_initialized()
        self._idle: dict[Any, float] = {}  # actor -> share of a GPU
        self._lent: dict[Any, float] = {}
        if self._is_ours:
            self._join(address)

    def _join(self, address: str | None) -> None:
        where = f"join the cluster at {address}"
        hint = (
            "; start fedattune on a machine of the cluster, with the Ray version and the token of the other machines "
            "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)"
        )
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            where, hint = "start Ray on this machine", ""
            options |= {"include_dashboard": False, "num_cpus": torch.get_num_threads()}
            options["_node_ip_address"] = "127.0.0.1"
        try:
            self.ray.init(address or "local", **options)
        except Exception as error:
            with suppress(Exception):
                self.ray.shutdown()
            raise RunError(f"engine ray: cannot {where}: {summarize_error(error)}{hint}") from error

    def count_actors(self, ray: Ray, n_clients: int) -> int:
        """Count the actors that the options ask for: by default one per core, or as many as the GPUs hold."""
        has = self.ray.cluster_resources()
        share, gpus = ray.gpus, float(has.get("GPU", 0))
        max_actors = int(gpus / share + 1e-9) if share else max(1, int(has.get("CPU", 1)))
        n = min(ray.actors or max_actors, n_clients)
        if share and not 0 < n <= max_actors:
            raise ConfigError(
                f"ray_gpus: got {share:g} of a GPU for each of {ray.actors or 1} actors, but the cluster has "
                f"{gpus:g} GPUs; ask for fewer actors or a smaller share"
            )
        return n

    def count_threads(self, actors: int) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)) // actors)

    def acquire(self, gpus: float) -> Any:
        """Return an idle actor, or start one on any machine; Ray never restarts actors, so no loss goes unnoticed."""
        from .actor import RayActor

        idle = next((actor for actor, share in self._idle.items() if share == gpus), None)
        if idle is None:
            options = {"num_cpus": ACTOR_CPUS, "num_gpus": gpus, "scheduling_strategy": self._place(gpus)}
            idle = self.ray.remote(**options, max_restarts=0, max_task_retries=0)(RayActor).remote()
        else:
            del self._idle[idle]
        self._lent[idle] = gpus
        return idle

    def _place(self, gpus: float) -> Any:
        """Choose the machines in turn; Ray's own spreading may put all actors on one machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}
        able = [n for n, r in alive.items() if r.get("CPU", 0) >= ACTOR_CPUS and r.get("GPU", 0) >= gpus]
        if not able:
            return "SPREAD"
        # Soft: if that machine has no room or is lost, Ray takes another one.
        return NodeAffinitySchedulingStrategy(sorted(able)[len(self._lent) % len(able)], soft=True)

    def release(self, actor: Any) -> None:
        """Keep an actor for its next user, if it is alive."""
        share = self._lent.pop(actor)
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(actor.close.remote())
            self._idle[actor] = share

    def kill(self, actor: Any) -> None:
        """End an actor, which may be lost already."""
        self._lent.pop(actor, None)
        with suppress(Exception):
            self.ray.kill(actor)

    def close(self) -> None:
        for actor in [*self._lent, *self._idle]:
            self.kill(actor)
        self._idle.clear()
        if self._is_ours:
            self.ray.shutdown()


def summarize_actor_error(error: BaseException) -> str:
    """Summarize Ray's report on a lost actor in one line: its last error, else its first sentence."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    raised = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", text, re.MULTILINE)
    if raised:
        return str(raised[-1])
    exits = re.search(r"Worker exit detail: (.*?)(?: Some common|\.? *$)", text, re.MULTILINE)
    return f"{summarize_error(error)} {exits[1]}" if exits else summarize_error(error)
