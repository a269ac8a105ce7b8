"""A connection to Ray, and the actors that this process has there."""

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
from ....core.settings import Settings

CONNECT_TIMEOUT_S = 5.0
"""Seconds within which an address must answer."""


ACTOR_CPUS = 0.001
"""Of a machine, that an actor asks for: its threads are set otherwise, and another one's place is never too small."""


QUIET_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Nothing is reported to Ray's makers; nothing is said of actors without a GPU."""


FAIL_FAST_ENV = {
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
}
"""A cluster that does not let us in is given up after seconds."""


_connections: "list[RayCluster]" = []
"""The connection of this process, while there is one."""


def check_ray(settings: Settings) -> None:
    """Check that Ray is here and the cluster can be reached, if it is asked for; starts nothing.

    Raises:
        ConfigError: it is not, or it cannot.

    """
    if settings.engine != "ray":
        return
    if find_spec("ray") is None:
        raise ConfigError(
            "engine: got 'ray', but the package Ray is not installed here; pip install 'fedattune[ray]'"
        )
    if settings.device == "cuda" and not settings.ray_gpus:
        raise ConfigError(
            "device: got 'cuda' with engine ray, whose actors have no GPU unless ray_gpus says which share of one "
            "each takes; give --ray-gpus 1, or leave the device at auto"
        )
    if not _connections and (address := _address(settings)):
        _check_address(address)


def _address(settings: Settings) -> str | None:
    """The cluster to join; None for one of this machine alone."""
    address = settings.ray_address or os.environ.get("RAY_ADDRESS")
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
    """The connection of this process to Ray: that of an outer block, that of the user's `ray.init`, or a new one.

    What was started for it ends with the block, and so do the actors.

    Raises:
        ConfigError: Ray is not installed, or its address is wrong.
        RunError: it cannot be started or joined.

    """
    check_ray(settings)
    if _connections:
        yield _connections[-1]
        return
    cluster = RayCluster(_address(settings))
    _connections.append(cluster)
    try:
        yield cluster
    finally:
        _connections.remove(cluster)
        cluster.close()


class RayCluster:
    """Ray as this process sees it; actors are lent and taken back, for they take seconds to start."""

    def __init__(self, address: str | None) -> None:
        for name, value in {**QUIET_ENV, **(FAIL_FAST_ENV if address else {})}.items():
            os.environ.setdefault(name, value)  # read when Ray is imported
        import ray

        self.ray: Any = ray
        self.ours = not ray.is_initialized()
        self._idle: list[tuple[float, Any]] = []
        self._lent: dict[Any, float] = {}
        if self.ours:
            self._join(address)

    def _join(self, address: str | None) -> None:
        quiet = {"include_dashboard": False} if address is None else {}
        here = (
            {"num_cpus": torch.get_num_threads(), "_node_ip_address": "127.0.0.1"} if address is None else {}
        )
        try:
            self.ray.init(
                address or "local", log_to_driver=False, logging_level=logging.ERROR, **quiet, **here
            )
        except Exception as error:
            where = f"join the cluster at {address}" if address else "start Ray on this machine"
            hint = (
                "; start fedattune on a machine of the cluster, with the Ray version of the others and their token "
                "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)"
                if address
                else ""
            )
            with suppress(Exception):
                self.ray.shutdown()
            raise RunError(f"engine ray: cannot {where}: {summarize_error(error)}{hint}") from error

    def n_actors(self, settings: Settings, n_clients: int) -> int:
        """Actors that the settings ask for: by default one per core, or as many as the GPUs hold.

        Raises:
            ConfigError: there are too few GPUs.

        """
        has = self.ray.cluster_resources()
        share, gpus = settings.ray_gpus, float(has.get("GPU", 0))
        most = int(gpus / share + 1e-9) if share else max(1, int(has.get("CPU", 1)))
        asked = min(settings.ray_actors or most, n_clients)
        if share and not 0 < asked <= most:
            raise ConfigError(
                f"ray_gpus: got {share:g} of a GPU for each of {settings.ray_actors or 1} actors, and the cluster has "
                f"{gpus:g} GPUs; ask for fewer actors or a smaller share"
            )
        return asked

    def threads(self, actors: int) -> int:
        """Threads that each of so many actors takes."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)) // actors)

    def n_machines(self) -> int:
        """Machines that are part of the cluster now."""
        return sum(bool(node["Alive"]) for node in self.ray.nodes())

    def lend(self, gpus: float) -> Any:
        """An actor on any machine; its state is never restored by Ray, so that none is lost unnoticed."""
        from .actor import RayActor

        for waiting in self._idle:
            if waiting[0] == gpus:
                self._idle.remove(waiting)
                actor = waiting[1]
                break
        else:
            kind = self.ray.remote(
                num_cpus=ACTOR_CPUS,
                num_gpus=gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=self._where(gpus),
            )(RayActor)
            actor = kind.remote()
        self._lent[actor] = gpus
        return actor

    def _where(self, gpus: float) -> Any:
        """The machines one after the other; Ray's own spreading may put all actors on one."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = [node for node in self.ray.nodes() if node["Alive"]]
        able = [
            node["NodeID"]
            for node in alive
            if node["Resources"].get("CPU", 0) >= ACTOR_CPUS and node["Resources"].get("GPU", 0) >= gpus
        ]
        if not able:
            return "SPREAD"
        # Soft: where that machine has no room, or is gone, another one does.
        return NodeAffinitySchedulingStrategy(sorted(able)[len(self._lent) % len(able)], soft=True)

    def take_back(self, actor: Any) -> None:
        """Keep an actor for whoever needs one next."""
        actor.close.remote()
        self._idle.append((self._lent.pop(actor), actor))

    def end(self, actor: Any) -> None:
        """End an actor, which may be gone already."""
        self._lent.pop(actor, None)
        with suppress(Exception):
            self.ray.kill(actor)

    def close(self) -> None:
        """End all actors, and what was started of Ray."""
        for actor in [*self._lent, *(actor for _, actor in self._idle)]:
            self.end(actor)
        self._idle.clear()
        if self.ours:
            self.ray.shutdown()


def summarize_actor_error(error: BaseException) -> str:
    """What Ray says of an actor that is gone, in one line: its last error, else its first sentence."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    raised = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", text, re.MULTILINE)
    if raised:
        return str(raised[-1])
    exits = re.search(r"Worker exit detail: (.*?)(?: Some common|\.? *$)", text, re.MULTILINE)
    return f"{summarize_error(error)} {exits[1]}" if exits else summarize_error(error)
