r"""L2GD.

    @misc{hanzely2020federated,
      author = {Hanzely, Filip and Richt{\'a}rik, Peter},
      title = {Federated Learning of a Mixture of Global and Local Models},
      year = {2020},
      eprint = {2002.05516},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    minimises  mean_i f_i(x_i) + lam/2 mean_i ||x_i - mean||^2;  every iteration tosses one coin for all clients:
    1 - p      x_i <- x_i - lr g_i(x_i)            lr = alpha / (n (1 - p))
    p          x_i <- (1 - c) x_i + c mean         c = alpha lam / (n p)

A round is one iteration of the first kind (`--steps 1`; more steps make it several) and the averagings before the next
one: m averagings with probability p^m (1 - p). Only rounds with an averaging communicate. lam = c p / (lr (1 - p)); the
paper's best p = lam / (L + lam) with its largest stable alpha gives c = 1/2.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD, StartPoint
from ..core.algorithm import (
    Algorithm,
    Finished,
    Joinable,
    LocalPlan,
    Measurable,
    Participation,
    Resting,
    TrafficCounting,
    change,
)
from ..core.effect import OWN_MODEL, Effect
from ..core.options import Fraction
from ..core.params import Params
from ..core.payload import Broadcast, LocalState, MixingMatrices, Payload, RoundContext, Traffic
from ..server.average import Average, AverageState, Weighting
from .table import Family, method


@dataclass(frozen=True)
class L2GDClient(SGD, Resting):
    """Client rule of L2GD: x <- keep x + (1 - keep) mean before the local steps, once per averaging of the server.

    The server rule `L2GDServer` sends `keep` and the number of the averaging.
    """

    start: StartPoint = "own"

    plan = LocalPlan(extras={"average": "L2GDServer"})

    def init_local_state(self, w0: Params) -> LocalState:
        like = next(iter(w0.values()))
        return {**super().init_local_state(w0), "done": Params(number=like.new_zeros(()))}

    def finish(self, carry: object, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        upload, new_state = super().finish(carry, sent, local_state, context)  # type: ignore[arg-type]
        return upload, {**new_state, "done": sent.extra["average"].only(["number"])}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        average = sent.extra["average"]
        new = average["number"] > local_state["done"]["number"]
        keep = torch.where(new, average["keep"], torch.ones_like(average["keep"]))
        return keep * local_state["own"] + (1 - keep) * sent.params

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return local_state["own"]


class L2GDState(AverageState):
    """The state of an average, the seed and number of the coin, and the share `keep` of the last toss."""

    seed: Tensor
    number: Tensor
    keep: Tensor


@dataclass(frozen=True)
class L2GDServer(Average[L2GDState], Joinable[L2GDState], Measurable, TrafficCounting):
    """Server rule of L2GD: after each round, average m times with probability chance^m (1 - chance).

    The mean stays the same in a series of m averagings. So one communication is enough, and makes
    x <- (1 - c)^m x + (1 - (1 - c)^m) mean. `chance` is the paper's p.
    """

    weighting: Weighting = "uniform"
    chance: float = 0.2
    c: float = 0.5

    def init(self, w0: Params, n_clients: int) -> L2GDState:
        return change(
            super().init(w0, n_clients),
            seed=torch.randint(2**62, ()),
            number=torch.tensor(0),
            keep=torch.tensor(1.0, dtype=torch.float64),
        )

    def broadcast(self, state: L2GDState, ids: Tensor) -> Broadcast:
        """Send the mean, the share `keep` of a client's own model (1: no averaging), and the number of the coin.

        In rounds with an averaging, the mixing matrix is keep I + (1 - keep) 1 p^T, for the averaged clients.
        """
        payload = super().broadcast(state, ids).payload
        like = next(iter(payload.params.values()), state["keep"]).dtype
        average = Params(keep=state["keep"], number=state["number"])
        average = average.map(lambda v: v.to(ids.device, like).expand(len(ids)))
        return Broadcast(payload._replace(extra={"average": average}), self._mixing(state, ids))

    def _mixing(self, state: L2GDState, ids: Tensor) -> MixingMatrices | None:
        p, keep = state["p"], state["keep"]
        if not _averages(state) or not p[ids].all():
            return None
        columns = p.nonzero().flatten()
        rows = ((1 - keep.to(p)) * p[columns]).repeat(len(ids), 1)
        own = torch.searchsorted(columns, ids)[:, None]
        return MixingMatrices(ids, columns, {"model": rows.scatter_add_(1, own, keep.to(p).expand_as(own))})

    def aggregate(self, state: L2GDState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> L2GDState:
        new = self._toss(state)
        if not _averages(new):
            return new
        return super().aggregate(new, ids, sent, uploads, n)

    needed_sums = Average.needed_sums  # in rounds with an averaging

    def aggregate_newcomers(
        self, state: L2GDState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> L2GDState:
        return self._toss(state)

    def measure_effects(self, state: L2GDState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the share of other models that one averaging mixes into a client's own; 0 if there was none."""
        p = state["p"]
        return (Effect(OWN_MODEL, self.c * float(p.sum() - p.square().sum())),)

    def bytes_down(self, state: L2GDState, ids: Tensor, sent: Payload) -> Traffic:
        return sent.traffic() if _averages(state) else Counter()

    def bytes_up(self, state: L2GDState, ids: Tensor, uploads: Payload) -> Traffic:
        return uploads.traffic() if _averages(state) else Counter()

    def _toss(self, state: L2GDState) -> L2GDState:
        number = state["number"] + 1
        rng = np.random.default_rng([int(state["seed"]), int(number)])
        steps = int(rng.geometric(1 - self.chance)) - 1  # successes before the first failure
        keep = torch.full_like(state["keep"], (1 - self.c) ** steps)
        return change(state, number=number, keep=keep)


def _averages(state: L2GDState) -> bool:
    return bool(state["keep"] < 1)


@method(
    Family.PERSONAL_MODEL,
    "one average in some rounds",
    "trains a personal model; then moves it to the average",
    tune={"p": (0.1, 0.2, 0.5), "c": (0.25, 0.5, 0.75)},
)
def l2gd(
    *, p: Annotated[float, Field(ge=0, le=0.99)] = 0.2, c: Fraction = 0.5, weighting: Weighting = "uniform"
) -> Algorithm:
    """Every client trains its own model; in some rounds, all models move to their mean.

    Source: Hanzely and Richtarik (2020), Algorithm 1. With the run's lr, lam = c p / (lr (1 - p)).

    Args:
        p: probability p of one more averaging before the next local training; 0 is training alone.
        c: step c of one averaging: 0 keeps x_i, 1 replaces x_i by the mean. The paper's best choices give 1/2.
        weighting: weights of the clients in the mean: `uniform`, as in the paper, or by training samples.
    """
    return Algorithm(
        L2GDClient(),
        L2GDServer(weighting, chance=p, c=c),
        participation=Participation(train="all", receive="all"),
        full_participation=True,
    )
