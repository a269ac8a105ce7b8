"""The random numbers of DP-SGD: which rows a step draws, and the noise on its gradients.

A simulation draws them from the run's seed, so that every engine and every repetition gives the same models. A real
node draws them from the operating system: whoever knows the seed could take the noise off again.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.streams import Stream
from ..data.types import Index
from .noise import draw_secret

WIDTH_STEP = 8
"""Widths of batches are multiples of this, so that few widths occur: a step is compiled once for each."""

NOISE_BYTES = 1 << 24
"""Bytes of noise that are drawn before the steps that use it."""


@dataclass(frozen=True)
class GradientNoise:
    """DP-SGD in one round of local training.

    Attributes:
        clip: norm to which each row's gradient is clipped.
        calls: gradients that a local step takes on each of its batches.
        multiplier: gives the noise multiplier of a client.
        is_secret: whether random numbers come from the operating system, as on real nodes, or from the run's seed.
    """

    clip: float
    calls: tuple[int, ...]
    multiplier: Callable[[int], float]
    is_secret: bool = False


def count_steps(
    steps: int | None, epochs: int | None, n: int, batch_size: int, per_step: int = 1, passes: int = 1
) -> int:
    """Count the local steps of a round; `per_step`, the batches of one step, counts for epochs alone."""
    if not n:
        return 0
    if steps is not None:
        return steps * passes
    return max(1, (epochs or 1) * passes * ceil(n / min(batch_size, n)) // per_step)


def make_generator(key: Sequence[int], *, is_secret: bool) -> np.random.Generator:
    """Make a generator of the stream that `key` numbers, or one that the operating system seeds."""
    seed = secrets.randbits(256) if is_secret else [int(one) for one in key]
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))


def draw_poisson_batches(samples: Index, batch_size: int, steps: int, per_step: int, rng: np.random.Generator) -> Index:
    """Draw batches into which every sample comes by itself, with probability `batch_size` over their number.

    From n on, a batch has all samples. No batch is cut: all are as wide as the largest one.

    Returns:
        Sample numbers (steps, per_step, width); -1 fills the rest of a batch.
    """
    n, count = len(samples), steps * per_step
    if not n or not count:
        return np.empty((0, per_step, 1), dtype=np.int64)
    if batch_size >= n:
        return np.broadcast_to(samples, (steps, per_step, n)).copy()
    sizes = rng.binomial(n, batch_size / n, size=count)
    width = min(n, max(1, -(-int(sizes.max()) // WIDTH_STEP)) * WIDTH_STEP)
    rows = np.full((count, width), -1, dtype=np.int64)
    for row, size in zip(rows, sizes.tolist(), strict=True):
        row[:size] = samples[rng.choice(n, size, replace=False)]
    return rows.reshape(steps, per_step, width)


@dataclass
class ClientNoise:
    """The noise of one client's gradients in one round, step by step.

    Attributes:
        calls, n_values: gradients of one step, and numbers of one gradient.
        weight: weight of a sample: one over the expected size of a batch.
        deviation: standard deviation of the noise on a gradient, after this weight.
        key, is_secret: the random stream, or whether the operating system gives the random numbers.
    """

    calls: int
    n_values: int
    weight: float
    deviation: float
    key: tuple[int, ...]
    is_secret: bool
    _rng: np.random.Generator | None = field(default=None, init=False)

    def draw(self, steps: int, dtype: torch.dtype) -> Tensor:
        """Draw the noise (steps, calls, values) of the next steps."""
        shape, n = (steps, self.calls, self.n_values), steps * self.calls * self.n_values
        if not self.deviation:
            return torch.zeros(shape, dtype=dtype)
        if self.is_secret:
            return torch.from_numpy(draw_secret(0)(n)).to(dtype).view(shape) * self.deviation
        if self._rng is None:
            self._rng = make_generator((*self.key, Stream.RECORD_NOISE), is_secret=False)
        kind: Any = np.float32 if dtype == torch.float32 else np.float64
        return torch.from_numpy(self._rng.standard_normal(n, dtype=kind)).to(dtype).view(shape) * self.deviation


class StepNoise:
    """The noise and the weights of the steps of several clients that run side by side.

    Args:
        owners: number of the client in `clients` that a lane trains in a step (steps, lanes); -1 for none.
    """

    def __init__(self, clients: Sequence[ClientNoise], owners: Index, dtype: torch.dtype, device: torch.device) -> None:
        self._clients, self._owners, self._dtype, self._device = clients, owners, dtype, device
        any_client = clients[0]
        self._shape = (owners.shape[1], any_client.calls, any_client.n_values)
        weights = np.array([*(client.weight for client in clients), 1.0])
        self.weights = torch.from_numpy(weights[owners]).to(device=device, dtype=dtype)
        """Weight (steps, lanes) of a sample in a step."""

    @property
    def steps_at_once(self) -> int:
        return max(1, NOISE_BYTES // (int(np.prod(self._shape)) * self._dtype.itemsize))

    def example(self) -> Tensor:
        """Return numbers in place of the noise of one step (lanes, calls, values), to compile and measure steps."""
        size = max(client.deviation for client in self._clients)
        values = torch.linspace(-size, size, int(np.prod(self._shape)), dtype=self._dtype)
        return values.view(self._shape).to(self._device)

    def draw(self, first: int, last: int) -> Tensor:
        """Draw the noise (steps, lanes, calls, values) of the steps `first` to `last` - 1; each step only once."""
        noise = torch.zeros((last - first, *self._shape), dtype=self._dtype)
        for lane, owners in enumerate(self._owners[first:last].T):
            cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
            for start, stop in pairwise(cuts):
                if owners[start] >= 0:
                    client = self._clients[owners[start]]
                    noise[start:stop, lane] = client.draw(stop - start, self._dtype)
        return noise.to(self._device)
