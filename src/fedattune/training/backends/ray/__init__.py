"""Run clients on actors of Ray: on the cores of one machine, or on the machines of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....core.settings import Settings
from ....runs.context import RunContext
from ...clients.state import PayloadFactory
from ..remote import RemoteBackend
from .cluster import check_ray, connect_ray

__all__ = ["check_ray", "connect_ray", "open_ray_backend"]


@contextmanager
def open_ray_backend(settings: Settings) -> Iterator[Callable[[RunContext, PayloadFactory], RemoteBackend] | None]:
    """Yield a factory of backends on Ray; None if the settings name another engine.

    At the end of the block, the backends release their actors, and Ray stops if this block started it.
    """
    if settings.execution.ray is None:
        yield None
        return
    from .backend import RayTransport

    with connect_ray(settings) as cluster:
        transports: list[RayTransport] = []

        def make_backend(context: RunContext, make_payload: PayloadFactory) -> RemoteBackend:
            transports.append(transport := RayTransport(context, cluster))
            return RemoteBackend(context, make_payload, transport)

        has_failed = True
        try:
            yield make_backend
            has_failed = False
        finally:
            for transport in transports:
                transport.release(at_once=has_failed)
