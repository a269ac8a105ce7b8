"""The server's products over large stacks of models, done by the actors where that is faster."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cluster import RayCluster

MIN_FLOPS = 1e10
"""Floating-point operations below which nobody asks whether to send a product away: a tenth of a second or so."""


MAX_TIME_SHARE = 0.8
"""Share of the time here that the actors may take at most, by an estimate."""


TRIAL_BYTES = 1 << 25
"""Bytes that are sent to and fro to see how long that takes."""


class ProductOffloader:
    """Does products in pieces on actors, for `elsewhere`.

    Whether that pays is estimated from the speed of a product here and of sending arrays to and fro, both measured
    when it is first asked for. On one machine it never does: the actors have the same cores.
    """

    def __init__(self, cluster: RayCluster, actors: Callable[[], Sequence[Any]]) -> None:
        self.ray, self.actors = cluster.ray, actors
        self.machines = cluster.n_machines()
        self.share = torch.get_num_threads() / float(self.ray.cluster_resources().get("CPU", 1))
        self._rates: tuple[float, float] | None = None

    def __call__(
        self, piece: Callable[..., Tensor], models: Tensor, rest: Any, rows: int, summed: bool
    ) -> Tensor | None:
        """The product, made of what `piece` gives for some columns of `models` (K, P) each; None: do it here.

        Answers have `rows` rows; they are added where `summed`, and else joined by columns. Where an actor is gone it
        is done here as well; whoever asks the actor next sees to it.
        """
        k, p = models.shape
        plain = models.device.type == "cpu" and models.dtype in (torch.float32, torch.float64)
        flops = 2.0 * rows * k * p
        n = len(self.actors())
        if not plain or not n or flops < MIN_FLOPS:
            return None
        values = k * p + (rows * k * n if summed else rows * p)
        try:
            if not self.pays(flops, values * models.itemsize):
                return None
            found = self.asked(piece, models, rest)
        except self.ray.exceptions.RayError:
            return None
        return torch.stack(found).sum(0) if summed else torch.cat(found, 1)

    def pays(self, flops: float, nbytes: float) -> bool:
        """Whether so much work is done sooner by the actors, to and from which so much has to travel."""
        if self.machines < 2:
            return False
        if self._rates is None:
            self._rates = self._measured()
        speed, sending = self._rates
        here = flops / speed
        return nbytes / sending + here * self.share < MAX_TIME_SHARE * here

    def asked(self, piece: Callable[..., Tensor], models: Tensor, rest: Any) -> list[Tensor]:
        """What the actors make of pieces of the columns."""
        actors = self.actors()
        given = self.ray.put(rest)
        calls = [
            actor.product.remote(piece, part.contiguous().numpy(), given)
            for actor, part in zip(actors, models.chunk(len(actors), 1), strict=False)
        ]
        return [torch.from_numpy(np.array(found)) for found in self.ray.get(calls)]

    def _measured(self) -> tuple[float, float]:
        """Operations per second here, and bytes per second to all actors and back."""
        a = torch.ones(512, 8192)
        load = torch.zeros(64, TRIAL_BYTES // 256)
        speed = 2.0 * 512 * 512 * 8192 / min(_time_call(lambda: a @ a.T) for _ in range(3))
        return speed, 2.0 * TRIAL_BYTES / min(
            _time_call(lambda: self.asked(return_models, load, None)) for _ in range(3)
        )


def return_models(models: Tensor, _: Any) -> Tensor:
    """The piece itself, for what sending it costs."""
    return models


def _time_call(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
