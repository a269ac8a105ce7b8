"""A mixture of client models for every client: one mixing matrix per component of the model."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, ServerUpdate, State
from ..params import Params
from ..select import Unit, groups


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
class Mixing(ServerUpdate):
    """Client i is sent sum_k M_l[i, k] theta_l[k] for every component l; a subclass says what M_l is.

    Attributes:
        unit: what shares one matrix: the whole `model`, a `layer` (weight and bias), or each `tensor`.
        pool: whose last uploads are mixed: the last `cohort`'s, or those of everybody `seen` so far.
            A client's own last upload is always in its pool; one that never uploaded is sent the initial model.

    """

    per_client: ClassVar[tuple[str, ...]] = ("theta", "in_pool", "seen", "n")

    unit: Unit = "model"
    pool: Literal["cohort", "seen"] = "cohort"

    @abstractmethod
    def weights(self, pool: Pool) -> Tensor:
        """The mixing matrix (R, K) of one component; rows sum to 1, zero where not allowed."""

    def init(self, w0: Params, n_clients: int) -> State:
        """The last upload of each of N clients (at first the initial model), and who is in the pool."""
        device = next(iter(w0.values())).device if w0 else torch.device("cpu")
        return {
            "theta": w0.copies(n_clients),
            "in_pool": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "seen": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "n": torch.ones(n_clients, dtype=torch.int64, device=device),
        }

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep what came back (written in place: it is all that the server holds); it is mixed when it is sent."""
        in_pool = cast(Tensor, state["in_pool"])
        if self.pool == "cohort":
            in_pool = torch.zeros_like(in_pool)
        return {
            "theta": cast(Params, state["theta"]).put_rows(ids, received.params),
            "in_pool": in_pool.index_fill(0, ids, True),
            "seen": cast(Tensor, state["seen"]).index_fill(0, ids, True),
            "n": cast(Tensor, state["n"]).index_copy(0, ids, n),
        }

    def newcomer(self, state: State) -> Params:
        """The mean of all clients' last uploads."""
        theta, seen = cast(Params, state["theta"]), cast(Tensor, state["seen"])
        return theta.rows(seen.nonzero().flatten() if seen.any() else slice(None)).map(lambda a: a.mean(0))

    def absorb(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep the uploads of clients that joined after training; they may be given others' models, not the reverse."""
        new = self.aggregate(
            {**state, "in_pool": cast(Tensor, state["in_pool"]).clone()}, ids, sent, received, n
        )
        return {**new, "in_pool": state["in_pool"]}

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
        """Mix component by component, so that no more than one tensor of the pool is gathered at a time."""
        theta = cast(Params, state["theta"])
        _, columns, weights = self.mixing(state, ids)
        mixed = {
            name: torch.tensordot(weights[component].to(theta[name].dtype), theta[name][columns], 1)
            for component, names in groups(theta, self.unit).items()
            for name in names
        }
        return Payload(Params({name: mixed[name] for name in theta}))


def _flat(theta: Params, names: list[str], columns: Tensor) -> Tensor:
    return torch.cat([theta[name][columns].reshape(len(columns), -1) for name in names], 1)
