"""Mixing matrices made small: as many rounds as a budget allows, one byte a weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..relations import Array, Relations, thinned

LEVELS, UNKNOWN = 254, 255


def pack(weights: Array, largest: float, signed: bool) -> bytes:
    """Weights (N, N), each as one byte: the fourth root of its share of the largest, UNKNOWN where not known.

    So large weights are exact to about a hundredth of themselves, those of a hundredth of the largest to three, and
    those of a millionth can still be told from zero. Signed ones have their zero in the middle.
    """
    root = (np.abs(np.nan_to_num(weights)) / largest) ** 0.25
    levels = LEVELS // 2 * (1 + np.sign(np.nan_to_num(weights)) * root) if signed else LEVELS * root
    out = np.round(levels).clip(0, LEVELS).astype(np.uint8)
    out[np.isnan(weights)] = UNKNOWN
    return out.tobytes()


@dataclass
class Frames:
    """Packed matrices of one run: `about` says where in the bytes each component of each round begins."""

    about: dict[str, Any]
    content: bytes


def frames(relations: Relations, shown: Sequence[int], most: int, start: int) -> Frames:
    """The matrices among the `shown` clients of at most `most` rounds; `start`: the bytes before them.

    Where a client was given nothing in a round, its last row before stands.
    """
    rounds = thinned(relations.rounds, most)
    square = np.ix_(shown, shown)
    stack = [{name: m[square] for name, m in relations.known(r).items()} for r in rounds]
    components = list(stack[-1]) if stack else []
    content, largest, signed = b"", {}, {}
    for name in components:
        series = np.stack([one.get(name, np.full((len(shown),) * 2, np.nan)) for one in stack])
        known = series[~np.isnan(series)]
        largest[name] = float(np.abs(known).max()) or 1.0 if len(known) else 1.0
        signed[name] = bool(len(known) and known.min() < 0)
        content += b"".join(pack(one, largest[name], signed[name]) for one in series)
    about = {
        "components": [{"name": n, "largest": largest[n], "signed": signed[n]} for n in components],
        "rounds": rounds,
        "start": start,
    }
    return Frames(about, content)
