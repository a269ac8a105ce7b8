"""Compute the server's products over large stacks of models on actors, where that is faster."""

from collections.abc import Callable, Sequence
from timeit import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cluster import RayCluster

MIN_FLOPS = 1e10
"""Floating-point operations below which a product stays in this process: about a tenth of a second."""


MAX_TIME_SHARE = 0.8
"""Largest estimated time of the actors, as a share of the time in this process."""


TRIAL_BYTES = 1 << 25
"""Bytes that are sent to the actors and back to measure the transfer rate."""


class ProductOffloader:
    """Split products into pieces and compute them on actors, for `offload_products`.

    The decision follows from two rates, measured on first use: products in this process, and arrays to the actors and
    back. On one machine the actors have the same cores, so products always stay in this process.
    """

    def __init__(self, cluster: RayCluster, actors: Callable[[], Sequence[Any]]) -> None:
        self.ray, self.actors = cluster.ray, actors
        self.machines = cluster.count_machines()
        self.share = torch.get_num_threads() / float(self.ray.cluster_resources().get("CPU", 1))
        self._rates: tuple[float, float] | None = None

    def __call__(
        self, piece: Callable[..., Tensor], models: Tensor, rest: Any, rows: int, summed: bool
    ) -> Tensor | None:
        """Compute a product on actors, if that is faster.

        If an actor is lost, the caller computes the product; the next message to the actor replaces it.

        Args:
            piece: piece(models, rest) computes the product for some columns of `models`.
            models: stack of models (K, P).
            rest: the other factor.
            rows: rows of the result.
            summed: whether the results of the pieces are added; else they are joined by columns.

        Returns:
            The product; None if the caller should compute it.
        """
        k, p = models.shape
        plain = models.device.type == "cpu" and models.dtype in (torch.float32, torch.float64)
        flops = 2.0 * rows * k * p
        n = len(self.actors())
        if not plain or not n or flops < MIN_FLOPS:
            return None
        values = k * p + (rows * k * n if summed else rows * p)
        try:
            if not self.is_worth(flops, values * models.itemsize):
                return None
            pieces = self.call_actors(piece, models, rest)
        except self.ray.exceptions.RayError:
            return None
        return torch.stack(pieces).sum(0) if summed else torch.cat(pieces, 1)

    def is_worth(self, flops: float, nbytes: float) -> bool:
        """Estimate whether the actors finish sooner, with `nbytes` to send to them and back."""
        if self.machines < 2:
            return False
        if self._rates is None:
            self._rates = self._measure()
        speed, sending = self._rates
        local_s = flops / speed
        return nbytes / sending + local_s * self.share < MAX_TIME_SHARE * local_s

    def call_actors(self, piece: Callable[..., Tensor], models: Tensor, rest: Any) -> list[Tensor]:
        """Compute the pieces of the columns on the actors."""
        actors = self.actors()
        factor = self.ray.put(rest)
        calls = [
            actor.product.remote(piece, part.contiguous().numpy(), factor)
            for actor, part in zip(actors, models.chunk(len(actors), 1), strict=False)
        ]
        return [torch.from_numpy(np.array(result)) for result in self.ray.get(calls)]

    def _measure(self) -> tuple[float, float]:
        """Measure operations per second in this process, and bytes per second to all actors and back."""
        a, load = torch.ones(512, 8192), torch.zeros(64, TRIAL_BYTES // 256)
        product = min(repeat(lambda: a @ a.T, number=1, repeat=3))
        transfer = min(repeat(lambda: self.call_actors(return_models, load, None), number=1, repeat=3))
        return 2.0 * 512 * 512 * 8192 / product, 2.0 * TRIAL_BYTES / transfer


def return_models(models: Tensor, _: Any) -> Tensor:
    """Return the piece itself, to measure the transfer alone."""
    return models
