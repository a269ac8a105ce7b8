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
from typing import Annotated, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..client import SGD, StartPoint
from ..core.algorithm import Algorithm, Participation
from ..core.options import Fraction
from ..core.params import Params
from ..core.payload import Broadcast, LocalState, MixingMatrices, Payload, RoundContext, ServerState, Traffic
from ..server.average import Average, Weighting
from .table import Family, method


@dataclass(frozen=True)
class L2GDClient(SGD):
    """x <- keep x + (1 - keep) mean before the local steps, once for every averaging that the server numbers.

    For servers that send `extra["average"]` with `keep` and `number` (`server.Coin`). Source: L2GD (Hanzely and
    Richtárik, 2020), Algorithm 1.
    """

    start: StartPoint = "own"

    @property
    def required_extras(self) -> dict[str, str]:
        """What the coin said."""
        return {"average": "L2GDServer"}

    def init_local_state(self, w0: Params) -> LocalState:
        """The own model, and the number of the last averaging it took part in."""
        like = next(iter(w0.values()))
        return {**super().init_local_state(w0), "done": Params(number=like.new_zeros(()))}

    def finish(
        self, carry: object, sent: Payload, local_state: LocalState, context: RoundContext
    ) -> tuple[Payload, LocalState]:
        """Upload and keep the trained model."""
        upload, kept = super().finish(carry, sent, local_state, context)  # type: ignore[arg-type]
        return upload, {**kept, "done": sent.extra["average"].only(["number"])}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """The own model after the averaging, if there is a new one."""
        average = sent.extra["average"]
        new = average["number"] > local_state["done"]["number"]
        keep = torch.where(new, average["keep"], torch.ones_like(average["keep"]))
        return keep * local_state["own"] + (1 - keep) * sent.params

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        """The own model."""
        return local_state["own"]


@dataclass(frozen=True)
class L2GDServer(Average):
    """After each round, with probability `chance` a run of averaging steps x <- (1 - c) x + c mean; else nothing.

    A run goes on with the same probability after each of its steps, as the coins of L2GD do between two local steps;
    the mean stays the same, so m steps need one communication and make x <- (1 - c)^m x + (1 - (1 - c)^m) mean.
    Source: L2GD (Hanzely and Richtárik, 2020), Algorithm 1. For clients with `client.Contraction`.
    """

    weighting: Weighting = "uniform"
    chance: float = 0.2
    c: float = 0.5

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """No averaging yet; the coins' seed."""
        return {
            **super().init(w0, n_clients),
            "seed": torch.randint(2**62, ()),
            "number": torch.tensor(0),
            "keep": torch.tensor(1.0, dtype=torch.float64),
        }

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Send the mean, the share of its own model that a client keeps (1: no averaging), and the coin's number.

        The mixing matrix is keep I + (1 - keep) 1 p^T. It comes in rounds with an averaging, for clients that were
        averaged.
        """
        payload = super().broadcast(state, ids).payload
        like = next(iter(payload.params.values()), cast(Tensor, state["keep"])).dtype
        average = {
            k: cast(Tensor, state[k]).to(ids.device, like).expand(len(ids)) for k in ("keep", "number")
        }
        return Broadcast(payload._replace(extra={"average": Params(average)}), self._mixing(state, ids))

    def _mixing(self, state: ServerState, ids: Tensor) -> MixingMatrices | None:
        p, keep = cast(Tensor, state["p"]), cast(Tensor, state["keep"])
        if not _averages(state) or not p[ids].all():
            return None
        columns = p.nonzero().flatten()
        rows = ((1 - keep.to(p)) * p[columns]).repeat(len(ids), 1)
        own = torch.searchsorted(columns, ids)[:, None]
        return MixingMatrices(ids, columns, {"model": rows.scatter_add_(1, own, keep.to(p).expand_as(own))})

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Flip the coin; average if it says so."""
        flipped = self._flipped(state)
        if not _averages(flipped):
            return flipped
        return {**flipped, **super().aggregate(state, ids, sent, received, n)}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Newcomers are drawn to the mean as it is."""
        return self._flipped(state)

    def bytes_down(self, state: ServerState, ids: Tensor, sent: Payload) -> Traffic:
        """Nothing travels without averaging."""
        return sent.traffic() if _averages(state) else Counter()

    def bytes_up(self, state: ServerState, ids: Tensor, received: Payload) -> Traffic:
        """Nothing travels without averaging."""
        return received.traffic() if _averages(state) else Counter()

    def _flipped(self, state: ServerState) -> ServerState:
        number = cast(Tensor, state["number"]) + 1
        rng = np.random.default_rng([int(cast(Tensor, state["seed"])), int(number)])
        steps = int(rng.geometric(1 - self.chance)) - 1  # successes before the first failure
        keep = torch.full_like(cast(Tensor, state["keep"]), (1 - self.c) ** steps)
        return {**state, "number": number, "keep": keep}


def _averages(state: ServerState) -> bool:
    return bool(cast(Tensor, state["keep"]) < 1)


@method(
    Family.PERSONAL_MODEL,
    "one average in some rounds",
    "trains a personal model; then moves it to the average",
)
def l2gd(
    *,
    p: Annotated[float, Field(ge=0, le=0.99)] = 0.2,
    c: Fraction = 0.5,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Every client trains its own model; now and then all are drawn to their mean."""
    return Algorithm(
        L2GDClient(),
        L2GDServer(weighting, chance=p, c=c),
        participation=Participation(train="all", receive="all"),
        full_participation=True,
    )
