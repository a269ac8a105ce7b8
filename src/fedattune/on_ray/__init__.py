"""Clients on actors of Ray: on the cores of one machine, or on the machines of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ..config import Settings
from .cluster import check_ray, connected

if TYPE_CHECKING:
    from ..rounds import Run
    from .cohort import RayCohort

__all__ = ["check_ray", "connected", "spread"]


@contextmanager
def spread(settings: Settings) -> "Iterator[Callable[[Run], RayCohort] | None]":
    """What a `Run` takes to have its clients on Ray; None where the settings name an engine of this process.

    The actors are let go at the end, and what was started of Ray is stopped, unless it was there before.

    Raises:
        ConfigError: Ray is not installed, its address is wrong, or it lacks what is asked for.
        RunError: it cannot be started or reached.

    """
    if settings.engine != "ray":
        yield None
        return
    from ..server.products import elsewhere
    from .cohort import RayCohort
    from .products import Products

    with connected(settings) as cluster, ExitStack() as stack:
        made: list[RayCohort] = []

        def place(run: "Run") -> RayCohort:
            made.append(cohort := RayCohort(run, cluster))
            stack.enter_context(elsewhere(Products(cluster, cohort.actors)))
            return cohort

        fine = False
        try:
            yield place
            fine = True
        finally:
            for cohort in made:
                cohort.leave(at_once=not fine)
