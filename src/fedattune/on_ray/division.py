"""Which clients go to which actor, and how their models come together again."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..params import Params
from ..wire import Parcel

if TYPE_CHECKING:
    from ..rounds import Run


def burdens(run: "Run") -> np.ndarray[Any, Any]:
    """How much there is to do for each client in a round: samples that it trains on, and a third of those scored."""
    settings, sizes = run.settings, run.federation.sizes
    train = sizes("train").double().numpy()
    batch = np.minimum(train, settings.batch_size)
    trained = train * settings.epochs if settings.epochs else batch * (settings.local_steps or 0)
    scored = (sizes("test") + sizes("validation")).double().numpy() / settings.eval_every
    return np.asarray(trained + scored / 3)


def divided(burden: np.ndarray[Any, Any], n: int) -> list[Tensor]:
    """Clients divided among n actors, so that all have about as much to do: the largest first, to who has least."""
    loads = [(0.0, 0, s) for s in range(n)]
    heapify(loads)
    whose = np.empty(len(burden), dtype=np.int64)
    for i in np.argsort(-burden, kind="stable"):
        load, count, s = loads[0]
        whose[i] = s
        heapreplace(loads, (load + float(burden[i]), count + 1, s))
    return [torch.from_numpy(np.flatnonzero(whose == s)) for s in range(n)]


def gathered(replies: Sequence[Parcel]) -> tuple[Params, Params]:
    """Models and buffers of all sites, sorted by client; a tensor that is one for all stays one."""
    full = [reply for reply in replies if reply.get("params")]
    if len(full) < len(replies):
        return Params(), Params()  # nothing was evaluated yet
    order = torch.tensor([i for reply in full for i in reply.head["ids"]]).argsort()

    def joint(name: str) -> Params:
        pieces = [reply.get(name) for reply in full]
        return Params({k: _joint([piece[k] for piece in pieces], order) for k in pieces[0]})

    return joint("params"), joint("buffers")


def _joint(pieces: list[Tensor], order: Tensor) -> Tensor:
    one = pieces[0][:1]
    if all((len(v) == 1 or v.stride(0) == 0) and torch.equal(v[:1], one) for v in pieces):
        return one.expand(len(order), *one.shape[1:])
    return torch.cat(pieces)[order.to(one.device)]
