"""Clients on actors of Ray: on the cores of one machine, or on the machines of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ....core.settings import Settings
from ...client_state import Sender
from ...context import RunContext
from .cluster import check_ray, connect_ray

if TYPE_CHECKING:
    from .backend import RayBackend

__all__ = ["check_ray", "connect_ray", "open_ray_backend"]


@contextmanager
def open_ray_backend(settings: Settings) -> "Iterator[Callable[[RunContext, Sender], RayBackend] | None]":
    """What a `RoundLoop` takes to have its clients on Ray; None where the settings name an engine of this process.

    The actors are let go at the end, and what was started of Ray is stopped, unless it was there before.

    Raises:
        ConfigError: Ray is not installed, its address is wrong, or it lacks what is asked for.
        RunError: it cannot be started or reached.

    """
    if settings.engine != "ray":
        yield None
        return
    from ....server.products import offload_products
    from .backend import RayBackend
    from .offload import ProductOffloader

    with connect_ray(settings) as cluster, ExitStack() as stack:
        made: list[RayBackend] = []

        def make_backend(context: RunContext, send: Sender) -> RayBackend:
            made.append(cohort := RayBackend(context, cluster, send))
            stack.enter_context(offload_products(ProductOffloader(cluster, cohort.actors)))
            return cohort

        fine = False
        try:
            yield make_backend
            fine = True
        finally:
            for cohort in made:
                cohort.leave(at_once=not fine)
