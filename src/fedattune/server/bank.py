"""The last upload of every client, kept on the server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, ServerUpdate, State
from ..params import Params, as_slice
from ..select import Unit, groups
from .products import mix


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
        cast(Params, state["theta"]).put_rows(ids, received.params)
        return self.heard_from(state, ids, n)

    def heard_from(self, state: State, ids: Tensor, n: Tensor) -> State:
        """Note, in place as well, that clients `ids` uploaded models trained on n (C,) samples."""
        for flag in ("in_pool", "seen"):
            cast(Tensor, state[flag]).index_fill_(0, ids, True)
        cast(Tensor, state["n"]).index_copy_(0, ids, n)
        return state

    def newcomer(self, state: State) -> Params:
        """The mean of all clients' last uploads."""
        theta, seen = cast(Params, state["theta"]), cast(Tensor, state["seen"])
        rows = as_slice(seen.nonzero().flatten()) if seen.any() else slice(None)
        return Params({name: theta.only([name]).rows(rows)[name].mean(0) for name in theta})

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
    rows = as_slice(columns)
    new = {
        name: mix(weights[component], theta.only([name]).rows(rows)[name])
        for component, names in groups(theta, unit).items()
        for name in names
    }
    return Params({name: new[name] for name in theta})


def update_rows(stack: Params, ids: Tensor, write: Callable[[Params], None]) -> None:
    """Let `write` change rows `ids` of a stack; it is given the rows themselves where that needs no copy."""
    rows = as_slice(ids)
    models = stack.rows(rows)
    write(models)
    if not (isinstance(stack, Params) and isinstance(rows, slice)):
        stack.put_rows(ids, models)
