"""A mixture of client models for every client: one mixing matrix per component of the model."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State
from ..params import Params
from ..select import Unit, groups
from .bank import Bank, mixed


class Pool(NamedTuple):
    """One component of the models that can be mixed, K of them, for R receiving clients.

    Attributes:
        theta: (K, P) the component of every model, flattened.
        own: (R,) position among the K of each receiving client's own last upload.
        member: (K,) whether a model is in the pool for others (a receiver's own always is for itself).
        allowed: (R, K) whether a receiving client may be given a model.
        n: (K,) training samples.

    """

    theta: Tensor
    own: Tensor
    member: Tensor
    allowed: Tensor
    n: Tensor


@dataclass(frozen=True)
class Mixing(Bank):
    """Client i is sent sum_k M_l[i, k] theta_l[k] for every component l; a subclass says what M_l is.

    Attributes:
        unit: what shares one matrix: the whole `model`, a `layer` (weight and bias), or each `tensor`.
        pool: whose last uploads are mixed: the last `cohort`'s, or those of everybody `seen` so far.
            A client's own last upload is always in its pool; one that never uploaded is sent the initial model.

    """

    unit: Unit = "model"
    pool: Literal["cohort", "seen"] = "cohort"

    @abstractmethod
    def weights(self, pool: Pool) -> Tensor:
        """The mixing matrix (R, K) of one component; rows sum to 1, zero where not allowed."""

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep what came back; it is mixed when it is sent."""
        if self.pool == "cohort":
            state = {**state, "in_pool": torch.zeros_like(cast(Tensor, state["in_pool"]))}
        return super().aggregate(state, ids, sent, received, n)

    def pools(self, state: State, ids: Tensor) -> tuple[Tensor, dict[str, Pool]]:
        """Which clients' models (K,) can be mixed for clients `ids`, and these models component by component."""
        theta, in_pool = cast(Params, state["theta"]), cast(Tensor, state["in_pool"])
        columns = in_pool.index_fill(0, ids, True).nonzero().flatten()
        own = torch.searchsorted(columns, ids)
        # One that never uploaded has nothing to compare with: it may only be given its own (initial) model.
        member = in_pool[columns]
        allowed = member & cast(Tensor, state["seen"])[ids][:, None]
        allowed = allowed.scatter(1, own[:, None], True)
        n = cast(Tensor, state["n"])[columns]
        return columns, {
            component: Pool(_flat(theta, names, columns), own, member, allowed, n)
            for component, names in groups(theta, self.unit).items()
        }

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices:
        """The matrices of all components for clients `ids`."""
        columns, pools = self.pools(state, ids)
        return MixingMatrices(
            ids, columns, {component: self.weights(pool) for component, pool in pools.items()}
        )

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The mixture that each of clients `ids` is sent."""
        return Payload(mixed(cast(Params, state["theta"]), self.unit, self.mixing(state, ids)))


def _flat(theta: Params, names: list[str], columns: Tensor) -> Tensor:
    return torch.cat([theta[name][columns].reshape(len(columns), -1) for name in names], 1)
