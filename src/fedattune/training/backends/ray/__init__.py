"""Run clients on actors of Ray: on the cores of one machine, or on the machines of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ....core.settings import Settings
from ....runs.context import RunContext
from ...clients.state import PayloadFactory
from .cluster import check_ray, connect_ray

if TYPE_CHECKING:
    from .backend import RayBackend

__all__ = ["check_ray", "connect_ray", "open_ray_backend"]


@contextmanager
def open_ray_backend(
    settings: Settings,
) -> "Iterator[Callable[[RunContext, PayloadFactory], RayBackend] | None]":
    """Yield a factory of backends on Ray; None if the settings name another engine.

    At the end of the block, the backends release their actors, and Ray stops if this block started it.

    Raises:
        ConfigError: Ray is not installed, its address is wrong, or it lacks resources.
        RunError: Ray cannot be started or reached.
    """
    if settings.engine != "ray":
        yield None
        return
    from .backend import RayBackend

    with connect_ray(settings) as cluster:
        backends: list[RayBackend] = []

        def make_backend(context: RunContext, make_payload: PayloadFactory) -> RayBackend:
            backends.append(backend := RayBackend(context, cluster, make_payload))
            return backend

        has_failed = True
        try:
            yield make_backend
            has_failed = False
        finally:
            for backend in backends:
                backend.release(at_once=has_failed)
