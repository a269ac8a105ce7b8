"""The last upload of every client, kept on the server."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, ServerUpdate, State
from ..params import Params
from ..select import Unit, groups


@dataclass(frozen=True)
class Bank(ServerUpdate):
    """Keeps every client's last upload; a subclass says what it makes of them."""

    per_client: ClassVar[tuple[str, ...]] = ("theta", "in_pool", "seen", "n")

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
        return {
            **state,
            "theta": cast(Params, state["theta"]).put_rows(ids, received.params),
            "in_pool": cast(Tensor, state["in_pool"]).index_fill(0, ids, True),
            "seen": cast(Tensor, state["seen"]).index_fill(0, ids, True),
            "n": cast(Tensor, state["n"]).index_copy(0, ids, n),
        }

    def newcomer(self, state: State) -> Params:
        """The mean of all clients' last uploads."""
        theta, seen = cast(Params, state["theta"]), cast(Tensor, state["seen"])
        return theta.rows(seen.nonzero().flatten() if seen.any() else slice(None)).map(lambda a: a.mean(0))

    def join(self, state: State, n: int) -> State:
        """The state with `n` more clients, whose models nobody else is given."""
        in_pool = cast(Tensor, state["in_pool"])
        return {**super().join(state, n), "in_pool": torch.cat([in_pool, in_pool.new_zeros(n)])}

    def absorb(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Keep the uploads of clients that joined after training; they may be given others' models, not the reverse."""
        new = self.aggregate(
            {**state, "in_pool": cast(Tensor, state["in_pool"]).clone()}, ids, sent, received, n
        )
        return {**new, "in_pool": state["in_pool"]}


def mixed(theta: Params, unit: Unit, matrices: MixingMatrices) -> Params:
    """sum_k M_l[i, k] theta_l[k] for every component l, gathering no more than one tensor of the models at a time."""
    _, columns, weights = matrices
    new = {
        name: torch.tensordot(weights[component].to(theta[name].dtype), theta[name][columns], 1)
        for component, names in groups(theta, unit).items()
        for name in names
    }
    return Params({name: new[name] for name in theta})
