"""Mix a model for every client from the clients' last uploads: one mixing matrix per component of the model."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Discardable, Joinable, Measurable, PerClient, Quarantining, ServerTraits, change
from ..core.effect import Effect, measure_mixing
from ..core.errors import ConfigError
from ..core.params import Params, as_slice
from ..core.payload import Broadcast, MixingMatrices, Payload
from ..core.selectors import Unit, group_names
from .products import TensorLoader, dots, flatten, mix

CLIP = 2.0
"""Largest distance from the own model, in the median distance of the row, at which a model enters unclipped."""


@dataclass(frozen=True)
class MixtureLimits:
    """Limits of the weights of other clients' models in a mixture; what they lose goes to the client's own model.

    Attributes:
        max_share: largest weight of any one other client; None for no limit.
        clip: leave out models whose cosine with the own model is below 0, and clip the others to `CLIP` times the
            median distance from the own model. To clip theta_k - theta_i is to scale the weight of theta_k.
    """

    max_share: float | None = None
    clip: bool = False

    def apply(self, weights: Tensor, own: Tensor, products: Tensor | None, squares: Tensor | None) -> Tensor:
        """Return limited weights (R, K), whose row i has its own model in column own[i].

        To clip needs the dot products (R, K) of the own models with all, and the squared norms (K,) of all.
        """
        columns = own[:, None]
        others = weights.scatter(1, columns, 0.0)
        if self.clip and products is not None and squares is not None:
            distances = (squares[own][:, None] + squares - 2 * products).clamp_min(0).sqrt()
            counted = distances.masked_fill(others == 0, torch.nan)  # the models that have a weight set the scale
            scale = CLIP * counted.nanmedian(1, keepdim=True).values.nan_to_num(0.0)
            others = others * (scale / distances.clamp_min(1e-30)).clamp_max(1).to(others.dtype)
            others = others.masked_fill(products < 0, 0.0)
        if self.max_share is not None:
            others = others.clamp_max(self.max_share)
        return others.scatter(1, columns, 1 - others.sum(1, keepdim=True))


BLOCK_CLIENTS = 256
"""Maximum number of clients to mix at a time, unless the pool is larger."""


class StoreState(TypedDict):
    """Every client's last upload `theta`, two flags, and the sample count `n` behind it."""

    theta: PerClient[Params]
    in_pool: PerClient[Tensor]
    has_uploaded: PerClient[Tensor]
    n: PerClient[Tensor]


StoreT = TypeVar("StoreT", bound=StoreState)


@dataclass(frozen=True)
class UploadStore(Joinable[StoreT], Measurable, Discardable):
    """Base of rules that keep every client's last upload."""

    traits = ServerTraits(StoreState)

    def init(self, w0: Params, n_clients: int) -> StoreT:
        device = next(iter(w0.values())).device if w0 else torch.device("cpu")
        state: StoreState = {
            "theta": w0.copies(n_clients),
            "in_pool": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "has_uploaded": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "n": torch.ones(n_clients, dtype=torch.int64, device=device),
        }
        return cast(StoreT, state)

    def aggregate(self, state: StoreT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StoreT:
        """Store the uploads, in place: they are the largest part of the state. `broadcast` mixes them."""
        state["theta"].put_rows(ids, uploads.params)
        return self.mark_uploaded(state, ids, n)

    def mark_uploaded(self, state: StoreT, ids: Tensor, n: Tensor) -> StoreT:
        """Mark clients `ids` in place: they uploaded models trained on `n` (C,) samples."""
        for flags in (state["in_pool"], state["has_uploaded"]):
            flags.index_fill_(0, ids, True)
        state["n"].index_copy_(0, ids, n)
        return state

    def discard_uploads(self, state: StoreT, ids: Tensor) -> StoreT:
        for flags in (state["in_pool"], state["has_uploaded"]):
            flags.index_fill_(0, ids, False)
        return state

    def find_pool(self, state: StoreT) -> Tensor:
        """Return whose models (N,) others may receive."""
        return state["in_pool"]

    def forget(self, state: StoreT, ids: Tensor) -> StoreT:
        """Discard the uploads of clients `ids`, and put the mean model of the others in their place.

        It is for rules that compare all stored models, whoever may receive them.
        """
        state = UploadStore.discard_uploads(self, state, ids)
        others = self.find_pool(state).nonzero().flatten()
        theta = state["theta"]
        if len(others):
            for name in theta:
                one = theta.only([name])
                one.put_rows(ids, Params({name: one.rows(others)[name].mean(0)}).copies(len(ids)))
        return state

    def measure_effects(self, state: StoreT, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        return measure_mixing(mixing)

    def newcomer_model(self, state: StoreT) -> Params:
        """Return the mean of the last uploads of all clients that ever uploaded, or the initial model."""
        theta, has_uploaded = state["theta"], state["has_uploaded"]
        rows = as_slice(has_uploaded.nonzero().flatten()) if has_uploaded.any() else slice(None)
        return Params({name: theta.only([name]).rows(rows)[name].mean(0) for name in theta})

    def add_clients(self, state: StoreT, n_new: int) -> StoreT:
        """Return the state with `n_new` more clients, whose models no other client receives."""
        in_pool = state["in_pool"]
        in_pool = torch.cat([in_pool, in_pool.new_zeros(n_new)])
        return change(super().add_clients(state, n_new), in_pool=in_pool)

    def aggregate_newcomers(self, state: StoreT, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StoreT:
        """Store the uploads of newcomers. Newcomers receive the models of others, but not the reverse."""
        pool = state["in_pool"]
        new = self.aggregate(change(state, in_pool=pool.clone()), ids, sent, uploads, n)
        return change(new, in_pool=pool)


class QuarantineState(StoreState):
    """A store with a flag for clients in quarantine."""

    quarantined: PerClient[Tensor]


QuarantineT = TypeVar("QuarantineT", bound=QuarantineState)


class QuarantineStore(UploadStore[QuarantineT], Quarantining):
    """A store whose rule can quarantine clients, by `find_pool` and the flag `quarantined`."""

    traits = ServerTraits(QuarantineState)

    def init(self, w0: Params, n_clients: int) -> QuarantineT:
        state = super().init(w0, n_clients)
        return change(state, quarantined=torch.zeros_like(state["in_pool"]))

    def quarantine(self, state: QuarantineT, ids: Tensor) -> QuarantineT:
        state["quarantined"].index_fill_(0, ids, True)
        return state

    def find_pool(self, state: QuarantineT) -> Tensor:
        return super().find_pool(state) & ~state["quarantined"]

    def newcomer_model(self, state: QuarantineT) -> Params:
        others = state["has_uploaded"] & ~state["quarantined"]
        return super().newcomer_model(change(state, has_uploaded=others))


@dataclass(frozen=True)
class Pool:
    """The K models that the server may mix for R receiving clients: all components, or one after `split_pool`.

    Attributes:
        models: a stack with the tensors of the components.
        rows: (K,) rows of the stack that hold the K models, or a slice.
        own: (R,) position among the K models of each receiving client's own last upload.
        own_rows: the same, as a slice if they are consecutive.
        member: (K,) whether a model is in the pool.
        allowed: (R, K) whether a receiving client may receive a model; its own model is always allowed.
        n: (K,) training samples.
    """

    models: Params
    rows: Tensor | slice
    own: Tensor
    own_rows: Tensor | slice
    member: Tensor
    allowed: Tensor
    n: Tensor

    def tensor(self, name: str) -> Tensor:
        """Return one of the component's tensors (K, ...), which may be gathered now."""
        return self.models.only([name]).rows(self.rows)[name]

    @property
    def parts(self) -> list[TensorLoader]:
        """Functions that return the component's tensors, each as (K, P)."""
        return [partial(lambda one: flatten(self.tensor(one)), name) for name in self.models]

    def dots(self) -> Tensor:
        """Return the dot products (R, K) of each receiving client's component with all; a new tensor."""
        return dots(self.parts, self.own_rows, (len(self.own), len(self.member)))

    def squares(self, products: Tensor) -> Tensor:
        """Return the squared norms (K,); `products` (R, K) holds them if all K clients receive."""
        if len(self.own) == len(self.member):
            own = products.gather(1, self.own[:, None])[:, 0]
            return torch.empty_like(own).index_copy_(0, self.own, own)
        return torch.stack([torch.linalg.vector_norm(part(), dim=1).square() for part in self.parts]).sum(0)


@dataclass(frozen=True)
class Mixing(UploadStore[StoreState]):
    """Base of rules that send sum_k M_l[i, k] theta_l[k] to client i for every component l; `weights` makes M_l.

    Attributes:
        unit: unit that shares one matrix: the whole `model`, a `layer` (weight and bias), or each `tensor`.
        pool: clients whose last uploads are mixed: the last `cohort`, or `all` that ever uploaded. A client's own
            last upload is always allowed. A client that never uploaded receives the initial model.
        limits: limits of what enters a client's mixture.
    """

    unit: Unit = "model"
    pool: Literal["cohort", "all"] = "cohort"
    limits: MixtureLimits = field(default=MixtureLimits(), repr=False)

    @abstractmethod
    def weights(self, pool: Pool) -> Tensor:
        """Return the mixing matrix (R, K) of one component. Rows sum to 1; entries that are not allowed are 0."""

    def weights_and_numbers(self, pool: Pool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the matrix of `weights`, and numbers to send beside the mixture: name of the extra -> scalar tensor.

        The numbers depend on the members of the pool, not on the receiving clients. Override this for a rule whose
        clients need them.
        """
        return self.weights(pool), {}

    def aggregate(self, state: StoreState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> StoreState:
        if self.pool == "cohort":
            state["in_pool"].zero_()
        return super().aggregate(state, ids, sent, uploads, n)

    def pool_for(self, state: StoreState, ids: Tensor, members: Tensor) -> Pool:
        """Return the models to mix for clients `ids`, if clients `members` are in the pool: all components together."""
        rows = torch.unique(torch.cat([members, ids]))
        own = torch.searchsorted(rows, ids)
        # A client that never uploaded has nothing to compare with: it only receives its own (initial) model.
        member = state["in_pool"][rows]
        allowed = (member & state["has_uploaded"][ids][:, None]).scatter_(1, own[:, None], True)
        return Pool(state["theta"], rows, own, as_slice(own), member, allowed, state["n"][rows])

    def split_pool(self, pool: Pool) -> Iterator[tuple[str, Pool]]:
        """Yield each component and its part of a pool. A layer is gathered now, a whole model tensor by tensor."""
        rows = as_slice(pool.rows) if isinstance(pool.rows, Tensor) else pool.rows
        for component, names in group_names(pool.models, self.unit).items():
            models = pool.models.only(names)
            if self.unit == "model":
                yield component, replace(pool, models=models, rows=rows)
            else:
                yield component, replace(pool, models=models.rows(rows), rows=slice(None))

    def broadcast(self, state: StoreState, ids: Tensor) -> Broadcast:
        """Mix a model for each of clients `ids`.

        Up to `BLOCK_CLIENTS` clients (or the size of the pool) are mixed in one block, and the broadcast has its
        matrices. More clients are mixed in blocks without matrices, which would grow with the square of the clients.
        """
        theta, members = state["theta"], find_members(state)
        # A client outside the pool is compared with the pool and itself. In one block, all would be compared with all.
        blocks = torch.split(ids, max(BLOCK_CLIENTS, len(members)))
        new: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        extra: dict[str, Params] = {}
        for i, block in enumerate(blocks):
            whole = self.pool_for(state, block, members)
            for component, pool in self.split_pool(whole):
                weights, numbers = self.weights_and_numbers(pool)
                weights = self._limit(weights, pool)
                self._mix(weights, pool, new, i * len(blocks[0]), len(ids))
                if len(blocks) == 1:
                    matrices[component] = weights
                for name, number in numbers.items():
                    like = new[next(iter(pool.models))]
                    extra.setdefault(name, Params())[component] = number.to(like.dtype).repeat(len(ids))
                del weights, pool  # before the next component is gathered
        assert isinstance(whole.rows, Tensor)
        mixing = MixingMatrices(ids, whole.rows, matrices) if len(blocks) == 1 else None
        return Broadcast(Payload(Params({name: new[name] for name in theta}), extra), mixing)

    def _limit(self, weights: Tensor, pool: Pool) -> Tensor:
        if self.limits == MixtureLimits() or weights.shape != pool.allowed.shape:
            return weights
        products = pool.dots() if self.limits.clip else None
        squares = None if products is None else pool.squares(products)
        return self.limits.apply(weights, pool.own, products, squares)

    def _mix(self, weights: Tensor, pool: Pool, out: dict[str, Tensor], start: int, n: int) -> None:
        """Write the mixtures of one component into rows `start` and on of the stacks `out` of n models."""
        shape = pool.allowed.shape
        if weights.shape != shape:
            raise ConfigError(
                f"{type(self).__name__}.weights: got a matrix {tuple(weights.shape)}, expected {tuple(shape)}: one row "
                "per client that receives a mixture, and one column per model in the pool"
            )
        for name in pool.models:
            models = pool.tensor(name)
            if name not in out:
                out[name] = models.new_empty((n, *models.shape[1:]))
            mix(weights, models, out[name][start : start + len(weights)])
            del models  # before the next one is gathered


def find_members(state: StoreState) -> Tensor:
    """Return the clients (K,) in the pool."""
    in_pool = state["in_pool"]
    if in_pool.device.type == "cpu":  # several times as fast for a million clients
        return torch.from_numpy(np.flatnonzero(in_pool.numpy()))
    return in_pool.nonzero().flatten()


def cosines(pool: Pool) -> Tensor:
    """Return the cosine (R, K) of each receiving client's component with all: 1 with its own, 0 with a zero model."""
    alike = pool.dots()
    scale = pool.squares(alike).sqrt().clamp_min(1e-12).reciprocal()
    alike.mul_(scale[pool.own][:, None]).mul_(scale)
    alike.nan_to_num_(0.0, 0.0, 0.0)  # models of infinite norm resemble no model
    return alike.scatter_(1, pool.own[:, None], 1.0)
