"""A mixture of client models for every client: one mixing matrix per component of the model.

The last upload of every client, kept on the server.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import ServerUpdate
from ..core.errors import ConfigError
from ..core.params import Params, as_slice
from ..core.payload import Broadcast, MixingMatrices, Payload, ServerState
from ..core.selectors import Unit, group_names
from .products import Part, dots, flatten, mix


@dataclass(frozen=True)
class UploadStore(ServerUpdate):
    """Keeps every client's last upload; a subclass says what it makes of them."""

    per_client: ClassVar[tuple[str, ...]] = ("theta", "in_pool", "seen", "n")

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """The last upload of each of N clients (at first the initial model), and who is in the pool."""
        device = next(iter(w0.values())).device if w0 else torch.device("cpu")
        return {
            "theta": w0.copies(n_clients),
            "in_pool": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "seen": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "n": torch.ones(n_clients, dtype=torch.int64, device=device),
        }

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Keep what came back (written in place: it is all that the server holds); it is mixed when it is sent."""
        cast(Params, state["theta"]).put_rows(ids, received.params)
        return self.heard_from(state, ids, n)

    def heard_from(self, state: ServerState, ids: Tensor, n: Tensor) -> ServerState:
        """Note, in place as well, that clients `ids` uploaded models trained on n (C,) samples."""
        for flag in ("in_pool", "seen"):
            cast(Tensor, state[flag]).index_fill_(0, ids, True)
        cast(Tensor, state["n"]).index_copy_(0, ids, n)
        return state

    def newcomer_model(self, state: ServerState) -> Params:
        """The mean of all clients' last uploads."""
        theta, seen = cast(Params, state["theta"]), cast(Tensor, state["seen"])
        rows = as_slice(seen.nonzero().flatten()) if seen.any() else slice(None)
        return Params({name: theta.only([name]).rows(rows)[name].mean(0) for name in theta})

    def add_clients(self, state: ServerState, n: int) -> ServerState:
        """The state with `n` more clients, whose models nobody else is given."""
        in_pool = cast(Tensor, state["in_pool"])
        return {**super().add_clients(state, n), "in_pool": torch.cat([in_pool, in_pool.new_zeros(n)])}

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Keep the uploads of clients that joined after training; they may be given others' models, not the reverse."""
        new = self.aggregate(
            {**state, "in_pool": cast(Tensor, state["in_pool"]).clone()}, ids, sent, received, n
        )
        return {**new, "in_pool": state["in_pool"]}


BLOCK_CLIENTS = 256
"""Clients whose mixtures are made at a time, or as many as there are in the pool if these are more."""


class Receivers(NamedTuple):
    """Clients that are sent a mixture, R of them, and the K clients whose models are mixed for them.

    Attributes:
        columns: (K,) these clients, in order.
        own: (R,) position among the K of each receiving client's own last upload.
        member: (K,) whether a model is in the pool for others (a receiver's own always is for itself).
        allowed: (R, K) whether a receiving client may be given a model.
        n: (K,) training samples.

    """

    columns: Tensor
    own: Tensor
    member: Tensor
    allowed: Tensor
    n: Tensor


@dataclass(frozen=True)
class Pool:
    """One component of the models that can be mixed, K of them, for R receiving clients.

    Attributes:
        models: a stack with this component's tensors.
        rows: which K of its rows are meant.
        own, member, allowed, n: as in `Receivers`.

    """

    models: Params
    rows: Tensor | slice
    own: Tensor
    member: Tensor
    allowed: Tensor
    n: Tensor

    def tensor(self, name: str) -> Tensor:
        """One of the component's tensors (K, ...); not kept, as it may be gathered now."""
        return self.models.only([name]).rows(self.rows)[name]

    @property
    def parts(self) -> list[Part]:
        """What gives the component's tensors, each as (K, P)."""
        return [partial(_flat_part, self, name) for name in self.models]

    def dots(self) -> Tensor:
        """Dot products (R, K) of each receiving client's component with every other; may be written to."""
        return dots(self.parts, as_slice(self.own), (len(self.own), len(self.member)))

    def squares(self, products: Tensor) -> Tensor:
        """Squared lengths (K,), which are among the `products` (R, K) if everybody receives."""
        if len(self.own) == len(self.member):
            own = products.gather(1, self.own[:, None])[:, 0]
            return torch.empty_like(own).index_copy_(0, self.own, own)
        return torch.stack([torch.linalg.vector_norm(part(), dim=1).square() for part in self.parts]).sum(0)


@dataclass(frozen=True)
class Mixing(UploadStore):
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

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, received: Payload, n: Tensor
    ) -> ServerState:
        """Keep what came back; it is mixed when it is sent."""
        if self.pool == "cohort":
            cast(Tensor, state["in_pool"]).zero_()
        return super().aggregate(state, ids, sent, received, n)

    def receivers(self, state: ServerState, ids: Tensor, pooled: Tensor) -> Receivers:
        """Which models can be mixed for clients `ids`, if clients `pooled` are in the pool."""
        columns = torch.unique(torch.cat([pooled, ids]))
        own = torch.searchsorted(columns, ids)
        # One that never uploaded has nothing to compare with: it may only be given its own (initial) model.
        member = cast(Tensor, state["in_pool"])[columns]
        allowed = member & cast(Tensor, state["seen"])[ids][:, None]
        return Receivers(
            columns, own, member, allowed.scatter_(1, own[:, None], True), cast(Tensor, state["n"])[columns]
        )

    def components(self, state: ServerState) -> dict[str, list[str]]:
        """What has a matrix of its own, with the names of its tensors."""
        return group_names(cast(Params, state["theta"]), self.unit)

    def one(self, state: ServerState, names: list[str], receivers: Receivers) -> Pool:
        """One component of these models; a layer is gathered now, a whole model only tensor by tensor."""
        models, rows = cast(Params, state["theta"]).only(names), as_slice(receivers.columns)
        if self.unit != "model":
            models, rows = models.rows(rows), slice(None)
        return Pool(models, rows, *receivers[1:])

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Mix a model for each of clients `ids`.

        The matrices come with the mixtures of up to `BLOCK_CLIENTS` clients, or as many as the pool has. Mixtures of
        more clients are made in blocks, whose matrices are not kept: they would grow with the square of the clients.
        """
        theta, pooled = cast(Params, state["theta"]), find_members(state)
        # Of clients outside the pool each needs its own model alone beside it: all at once would be compared in vain.
        blocks = torch.split(ids, max(BLOCK_CLIENTS, len(pooled)))
        new: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        for i, block in enumerate(blocks):
            receivers = self.receivers(state, block, pooled)
            for component, names in self.components(state).items():
                weights = self._mix(self.one(state, names, receivers), new, i * len(blocks[0]), len(ids))
                if len(blocks) == 1:
                    matrices[component] = weights
                del weights
        mixing = MixingMatrices(ids, receivers.columns, matrices) if len(blocks) == 1 else None
        return Broadcast(Payload(Params({name: new[name] for name in theta})), mixing)

    def _checked(self, pool: Pool) -> Tensor:
        """The mixing matrix, which must be one of these models."""
        weights, shape = self.weights(pool), (len(pool.own), pool.allowed.shape[1])
        if tuple(weights.shape) != shape:
            raise ConfigError(
                f"{type(self).__name__}.weights: got a matrix {tuple(weights.shape)}, expected {shape}: a row for each "
                "client that is sent a mixture, and a column for each model in the pool"
            )
        return weights

    def _mix(self, pool: Pool, out: dict[str, Tensor], start: int, n: int) -> Tensor:
        """Write the mixtures of one component into rows `start` and on of the stacks `out` of n models.

        Return the mixing matrix (R, K).
        """
        weights = self._checked(pool)
        for name in pool.models:
            _write(weights, pool.tensor(name), out, name, start, n)
        return weights


def _flat_part(pool: Pool, name: str) -> Tensor:
    return flatten(pool.tensor(name))


def _write(weights: Tensor, models: Tensor, out: dict[str, Tensor], name: str, start: int, n: int) -> None:
    if name not in out:
        out[name] = models.new_empty((n, *models.shape[1:]))
    mix(weights, models, out[name][start : start + len(weights)])


def find_members(state: ServerState) -> Tensor:
    """The clients (K,) whose models are in the pool."""
    in_pool = cast(Tensor, state["in_pool"])
    if in_pool.device.type == "cpu":  # of a million, several times as fast
        return torch.from_numpy(np.flatnonzero(in_pool.numpy()))
    return in_pool.nonzero().flatten()


def cosines(pool: Pool) -> Tensor:
    """Cosine (R, K) of each receiving client's component with every other; 1 with its own, 0 with zeros."""
    alike = pool.dots()
    scale = pool.squares(alike).sqrt().clamp_min(1e-12).reciprocal()
    alike.mul_(scale[pool.own][:, None]).mul_(scale)
    alike.nan_to_num_(0.0, 0.0, 0.0)  # models so large that their lengths are infinite resemble nobody
    return alike.scatter_(1, pool.own[:, None], 1.0)
