"""Clip what leaves clients, and add Gaussian noise to it."""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import ConfigError
from ..core.params import Params
from ..core.payload import Payload
from ..core.streams import Stream

SUMMANDS = 4
"""Draws that make one number of the secret noise.

A single draw in floating-point numbers lets an observer exclude some values (Mironov, CCS 2012). From a sum, the draws
cannot be found back in practice (Holohan and Braghin, ESORICS 2021); Opacus does the same on request.
"""

MIN_VARIANCE = 1e-3
"""Smallest averaged running variance of BatchNorm after noise, so that a layer does not divide by zero."""

Draw = Callable[[int], NDArray[np.float64]]
"""Draws so many standard normal numbers."""

NoiseSource = Callable[[int], Draw]
"""Gives the generator of a client, by its number."""


class Uploaded(NamedTuple):
    """The uploads of a round, one row for each client, with BatchNorm statistics if these are averaged."""

    upload: Payload
    statistics: Params

    def parts(self) -> Iterator[Params]:
        """Yield all parts in a fixed order."""
        yield self.upload.params
        yield from self.upload.extra.values()
        yield self.statistics


def draw_seeded(seed: int, round_: int) -> NoiseSource:
    """Return the noise of one round of a simulation: it depends on seed, round and client alone."""

    def start(client: int) -> Draw:
        return np.random.default_rng([seed, Stream.CLIENT_NOISE, round_, client]).standard_normal

    return start


def draw_secret(_client: int) -> Draw:
    """Return the noise of the operating system's generator."""
    from scipy.special import ndtri

    def draw(n: int) -> NDArray[np.float64]:
        words = np.frombuffer(os.urandom(8 * SUMMANDS * n), dtype=np.uint64) >> np.uint64(12)
        uniform = (words.astype(np.float64) + 0.5) * 2.0**-52  # exact, and never 0 or 1
        total: NDArray[np.float64] = ndtri(uniform).reshape(SUMMANDS, n).sum(0) / np.sqrt(SUMMANDS)
        return total

    return draw


def clip_and_noise(
    uploaded: Uploaded, anchor: Uploaded, ids: Tensor, clip: float, deviation: float, draw: NoiseSource
) -> Uploaded:
    """Return anchor + clipped difference + noise for each client.

    The difference of a client is one vector over all its tensors; it is scaled down to a norm of at most `clip`. One
    whose norm is not finite counts as zero: a row that is rejected later takes its share of the noise on a sum along.

    Args:
        anchor: what the observer knows already; rows, or one for all. Names that it lacks count as zero.
        ids: (C,) numbers of the clients.
    """
    if odd := sorted({name for part in uploaded.parts() for name, v in part.items() if not v.is_floating_point()}):
        raise ConfigError(
            f"clients upload {', '.join(odd)}, which are no real numbers, so no noise can hide them; choose "
            "another method"
        )
    anchors = [anchor.upload.params, *(Params() for _ in uploaded.upload.extra), anchor.statistics]
    changes = [
        Params({k: v - known[k] if k in known else v for k, v in part.items()})
        for part, known in zip(uploaded.parts(), anchors, strict=True)
    ]
    square = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for v in (v for part in changes for v in part.values()):
        square += v.double().square().reshape(len(v), -1).sum(1)
    scale = (clip / square.sqrt().clamp_min(1e-300)).clamp_max(1.0)
    is_finite = square.isfinite()
    draws = [draw(i) for i in ids.tolist()] if deviation else []
    noised = []
    for part, known in zip(changes, anchors, strict=True):
        new = Params()
        for k, v in part.items():
            scales, has_norm = (column.view(-1, *[1] * (v.dim() - 1)) for column in (scale.to(v.dtype), is_finite))
            new[k] = torch.where(has_norm, v * scales, 0)
            for row, draw_one in zip(new[k], draws, strict=False):  # a tensor at a time: memory for one alone
                row.add_(torch.from_numpy(deviation * draw_one(row.numel())).to(row).view(row.shape))
            if k in known:
                new[k] += known[k]
        noised.append(new)
    params, *extras, statistics = noised
    return Uploaded(Payload(params, dict(zip(uploaded.upload.extra, extras, strict=True))), statistics)


def limit_variances(statistics: Params) -> Params:
    """Return averaged BatchNorm statistics whose variances are positive in spite of noise."""
    return Params({k: v.clamp_min(MIN_VARIANCE) if k.endswith("running_var") else v for k, v in statistics.items()})
