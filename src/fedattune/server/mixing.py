"""Mix a model for every client from the clients' last uploads: one mixing matrix per component of the model.

The rules come first, then the products of stacks of models that they need; products need hardly any memory beside the
result.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import ServerUpdate
from ..core.effect import Effect, measure_mixing
from ..core.errors import ConfigError
from ..core.params import Params, as_slice
from ..core.payload import Broadcast, MixingMatrices, Payload, ServerState
from ..core.selectors import Unit, group_names

BLOCK_CLIENTS = 256
"""Maximum number of clients to mix at a time, unless the pool is larger."""

BLOCK_VALUES = 1 << 20
"""Values of a stack to copy at a time: they fit into caches, and their memory is used again."""

MIN_BLOCK_COLUMNS = 512
"""Minimum columns of a stack to multiply at a time: with fewer, the additions cost more than the products."""

MIN_HALVED_MODELS = 512
"""Number of models from which on half of a symmetric product is copied from the other half."""

TensorLoader = Callable[[], Tensor]
"""Returns one tensor of a stack as (K, P); the tensor may be a temporary copy."""

Offload = Callable[[Callable[..., Tensor], Tensor, Any, int, bool], Tensor | None]
"""offload(piece, models, rest, rows, summed): compute piece(columns of models, rest) of `rows` rows in other processes,
and sum the pieces or join them by columns. None means: compute here."""


@dataclass(frozen=True)
class UploadStore(ServerUpdate):
    """Base of rules that keep every client's last upload."""

    per_client: ClassVar[tuple[str, ...]] = ("theta", "in_pool", "has_uploaded", "n")

    def init(self, w0: Params, n_clients: int) -> ServerState:
        """Return the last uploads `theta`, at first the initial model; two flags per client; and sample counts `n`."""
        device = next(iter(w0.values())).device if w0 else torch.device("cpu")
        return {
            "theta": w0.copies(n_clients),
            "in_pool": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "has_uploaded": torch.zeros(n_clients, dtype=torch.bool, device=device),
            "n": torch.ones(n_clients, dtype=torch.int64, device=device),
        }

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Store the uploads, in place: they are the largest part of the state. `broadcast` mixes them."""
        cast(Params, state["theta"]).put_rows(ids, uploads.params)
        return self.mark_uploaded(state, ids, n)

    def mark_uploaded(self, state: ServerState, ids: Tensor, n: Tensor) -> ServerState:
        """Mark clients `ids` in place: they uploaded models trained on `n` (C,) samples."""
        for flag in ("in_pool", "has_uploaded"):
            cast(Tensor, state[flag]).index_fill_(0, ids, True)
        cast(Tensor, state["n"]).index_copy_(0, ids, n)
        return state

    def measure_effects(self, state: ServerState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        """Measure the mixing weights."""
        return measure_mixing(mixing)

    def newcomer_model(self, state: ServerState) -> Params:
        """Return the mean of the last uploads of all clients that ever uploaded, or the initial model."""
        theta, has_uploaded = cast(Params, state["theta"]), cast(Tensor, state["has_uploaded"])
        rows = as_slice(has_uploaded.nonzero().flatten()) if has_uploaded.any() else slice(None)
        return Params({name: theta.only([name]).rows(rows)[name].mean(0) for name in theta})

    def add_clients(self, state: ServerState, n_new: int) -> ServerState:
        """Return the state with `n_new` more clients, whose models no other client receives."""
        in_pool = cast(Tensor, state["in_pool"])
        return {
            **super().add_clients(state, n_new),
            "in_pool": torch.cat([in_pool, in_pool.new_zeros(n_new)]),
        }

    def aggregate_newcomers(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Store the uploads of newcomers. Newcomers receive the models of others, but not the reverse."""
        new = self.aggregate(
            {**state, "in_pool": cast(Tensor, state["in_pool"]).clone()}, ids, sent, uploads, n
        )
        return {**new, "in_pool": state["in_pool"]}


@dataclass(frozen=True)
class Pool:
    """The K models that the server may mix for R receiving clients: all components, or one after `split_pool`.

    Attributes:
        models: a stack with the tensors of the components.
        rows: (K,) rows of the stack that hold the K models, or a slice.
        own: (R,) position among the K models of each receiving client's own last upload.
        member: (K,) whether a model is in the pool.
        allowed: (R, K) whether a receiving client may receive a model; its own model is always allowed.
        n: (K,) training samples.

    """

    models: Params
    rows: Tensor | slice
    own: Tensor
    member: Tensor
    allowed: Tensor
    n: Tensor

    def tensor(self, name: str) -> Tensor:
        """Return one of the component's tensors (K, ...), which may be gathered now."""
        return self.models.only([name]).rows(self.rows)[name]

    @property
    def parts(self) -> list[TensorLoader]:
        """Functions that return the component's tensors, each as (K, P)."""
        return [partial(_load_flat, self, name) for name in self.models]

    def dots(self) -> Tensor:
        """Return the dot products (R, K) of each receiving client's component with all; a new tensor."""
        return dots(self.parts, as_slice(self.own), (len(self.own), len(self.member)))

    def squares(self, products: Tensor) -> Tensor:
        """Return the squared lengths (K,); `products` (R, K) holds them if all K clients receive."""
        if len(self.own) == len(self.member):
            own = products.gather(1, self.own[:, None])[:, 0]
            return torch.empty_like(own).index_copy_(0, self.own, own)
        return torch.stack([torch.linalg.vector_norm(part(), dim=1).square() for part in self.parts]).sum(0)


@dataclass(frozen=True)
class Mixing(UploadStore):
    """Base of rules that send sum_k M_l[i, k] theta_l[k] to client i for every component l; `weights` makes M_l.

    Attributes:
        unit: unit that shares one matrix: the whole `model`, a `layer` (weight and bias), or each `tensor`.
        pool: clients whose last uploads are mixed: the last `cohort`, or `all` that ever uploaded. A client's own
            last upload is always allowed. A client that never uploaded receives the initial model.

    """

    unit: Unit = "model"
    pool: Literal["cohort", "all"] = "cohort"

    @abstractmethod
    def weights(self, pool: Pool) -> Tensor:
        """Return the mixing matrix (R, K) of one component. Rows sum to 1; entries that are not allowed are 0."""

    def weights_and_numbers(self, pool: Pool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the matrix of `weights`, and numbers to send beside the mixture: name of the extra -> scalar tensor.

        The numbers depend on the members of the pool, not on the receiving clients. Override this for a rule whose
        clients need them.
        """
        return self.weights(pool), {}

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        """Store the uploads. If the pool is the cohort, empty it first."""
        if self.pool == "cohort":
            cast(Tensor, state["in_pool"]).zero_()
        return super().aggregate(state, ids, sent, uploads, n)

    def pool_for(self, state: ServerState, ids: Tensor, members: Tensor) -> Pool:
        """Return the models to mix for clients `ids`, if clients `members` are in the pool: all components together."""
        rows = torch.unique(torch.cat([members, ids]))
        own = torch.searchsorted(rows, ids)
        # A client that never uploaded has nothing to compare with: it only receives its own (initial) model.
        member = cast(Tensor, state["in_pool"])[rows]
        allowed = (member & cast(Tensor, state["has_uploaded"])[ids][:, None]).scatter_(1, own[:, None], True)
        return Pool(cast(Params, state["theta"]), rows, own, member, allowed, cast(Tensor, state["n"])[rows])

    def split_pool(self, pool: Pool) -> Iterator[tuple[str, Pool]]:
        """Yield each component and its part of a pool. A layer is gathered now, a whole model tensor by tensor."""
        rows = as_slice(cast(Tensor, pool.rows))
        for component, names in group_names(pool.models, self.unit).items():
            models = pool.models.only(names)
            if self.unit == "model":
                yield component, replace(pool, models=models, rows=rows)
            else:
                yield component, replace(pool, models=models.rows(rows), rows=slice(None))

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        """Mix a model for each of clients `ids`.

        Up to `BLOCK_CLIENTS` clients (or the size of the pool) are mixed in one block, and the broadcast has its
        matrices. More clients are mixed in blocks without matrices, which would grow with the square of the clients.
        """
        theta, members = cast(Params, state["theta"]), find_members(state)
        # A client outside the pool is compared with the pool and itself. In one block, all would be compared with all.
        blocks = torch.split(ids, max(BLOCK_CLIENTS, len(members)))
        new: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        extra: dict[str, Params] = {}
        for i, block in enumerate(blocks):
            whole = self.pool_for(state, block, members)
            for component, pool in self.split_pool(whole):
                weights, numbers = self.weights_and_numbers(pool)
                self._mix(weights, pool, new, i * len(blocks[0]), len(ids))
                if len(blocks) == 1:
                    matrices[component] = weights
                for name, number in numbers.items():
                    like = new[next(iter(pool.models))]
                    extra.setdefault(name, Params())[component] = number.to(like.dtype).repeat(len(ids))
                del weights, pool  # before the next component is gathered
        mixing = MixingMatrices(ids, cast(Tensor, whole.rows), matrices) if len(blocks) == 1 else None
        return Broadcast(Payload(Params({name: new[name] for name in theta}), extra), mixing)

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


def _load_flat(pool: Pool, name: str) -> Tensor:
    return flatten(pool.tensor(name))


def find_members(state: ServerState) -> Tensor:
    """Return the clients (K,) in the pool."""
    in_pool = cast(Tensor, state["in_pool"])
    if in_pool.device.type == "cpu":  # several times as fast for a million clients
        return torch.from_numpy(np.flatnonzero(in_pool.numpy()))
    return in_pool.nonzero().flatten()


def cosines(pool: Pool) -> Tensor:
    """Return the cosine (R, K) of each receiving client's component with all: 1 with its own, 0 with a zero model."""
    alike = pool.dots()
    scale = pool.squares(alike).sqrt().clamp_min(1e-12).reciprocal()
    alike.mul_(scale[pool.own][:, None]).mul_(scale)
    alike.nan_to_num_(0.0, 0.0, 0.0)  # models of infinite length resemble no model
    return alike.scatter_(1, pool.own[:, None], 1.0)


_offload: ContextVar[Offload | None] = ContextVar("offload", default=None)


@contextmanager
def offload_products(offload: Offload) -> Iterator[None]:
    """Offer the large products to `offload` inside the block."""
    token = _offload.set(offload)
    try:
        yield
    finally:
        _offload.reset(token)


def _try_offload(
    piece: Callable[..., Tensor], models: Tensor, rest: Any, rows: int, *, summed: bool
) -> Tensor | None:
    offload = _offload.get()
    return None if offload is None else offload(piece, models, rest, rows, summed)


def flatten(tensor: Tensor) -> Tensor:
    """Flatten all axes behind the first: (K, P)."""
    return tensor.reshape(len(tensor), -1)


def column_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut the columns of a (rows, columns) matrix into blocks."""
    size = max(MIN_BLOCK_COLUMNS, BLOCK_VALUES // max(1, rows))
    for start in range(0, columns, size):
        yield slice(start, start + size)


def mix(weights: Tensor, models: Tensor, out: Tensor | None = None) -> Tensor:
    """Return sum_k weights[i, k] models[k] (R, ...), from `weights` (R, K) and `models` (K, ...)."""
    shape = (len(weights), *models.shape[1:])
    into = None if out is None else out.view(len(weights), -1)
    stack, weights = flatten(models), weights.to(models.dtype)
    if (result := _try_offload(_mixture, stack, weights, len(weights), summed=False)) is not None:
        return (result if into is None else into.copy_(result)).view(shape)
    return torch.mm(weights, stack, out=into).view(shape)


def _mixture(models: Tensor, weights: Tensor) -> Tensor:
    return torch.mm(weights, models)


def dots(parts: Iterable[TensorLoader], rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    """Return the dot products (R, K) of some rows of a stack with all rows.

    Args:
        parts: the tensors of the stack.
        rows: (R,) the rows.
        size: (R, K).

    Raises:
        ValueError: the stack has no tensor.

    """
    out: Tensor | None = None
    for part in parts:
        out = _accumulate_dots(out, part(), rows, size)
    if out is None:
        raise ValueError("dots: got a component without tensors, expected one at least")
    return out


def _accumulate_dots(out: Tensor | None, a: Tensor, rows: Tensor | slice, size: tuple[int, int]) -> Tensor:
    # A separate function, so that one part is freed before the next is made.
    if (result := _try_offload(_dots, a, rows, size[0], summed=True)) is not None:
        return result if out is None else out.add_(result)
    out = a.new_zeros(size) if out is None else out
    _add_dots(out, a[rows], a)
    return out


def _dots(models: Tensor, rows: Tensor | slice) -> Tensor:
    some = models[rows]
    out = models.new_zeros(len(some), len(models))
    _add_dots(out, some, models)
    return out


def _add_dots(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b^T to `out`; if a is b, copy the half above the diagonal from the half below it."""
    n = len(b)
    if n < MIN_HALVED_MODELS or a.data_ptr() != b.data_ptr() or len(a) != n:
        out.addmm_(a, b.T)
        return
    half = n // 2
    out[:half, :half].addmm_(b[:half], b[:half].T)
    out[half:].addmm_(b[half:], b.T)
    out[:half, half:] = out[half:, :half].T


def squared_distances(parts: Sequence[TensorLoader], like: Tensor, error: float) -> Tensor:
    """Return ||theta_i - theta_j||^2 (K, K) in float64 between the K models of a stack.

    Products of centred models give the distances. If rounding could exceed `error`, because one model is far from the
    mean, the differences of all pairs do, which takes longer.

    Args:
        parts: the tensors of the stack.
        like: (K,) a tensor on the device of the result.
        error: largest error of a distance.

    """
    n = len(like)
    out = torch.zeros(n, n, dtype=torch.float64, device=like.device)
    for part in parts:
        if (result := _try_offload(_centred_dots, models := part(), None, n, summed=True)) is not None:
            out += result
        else:
            _add_centred_dots(out, models)
        del models
    lengths = out.diagonal().clone()
    if lengths.max() * torch.finfo(torch.float64).eps <= error:
        return out.mul_(-2).add_(lengths).add_(lengths[:, None]).clamp_min_(0)
    out.zero_()
    for part in parts:
        out += torch.cdist(a := part(), a, compute_mode="donot_use_mm_for_euclid_dist").double().square_()
        del a
    return out


def _centred_dots(models: Tensor, _: None) -> Tensor:
    out = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    _add_centred_dots(out, models)
    return out


def _add_centred_dots(out: Tensor, models: Tensor) -> None:
    for columns in column_blocks(2 * len(models), models.shape[1]):
        part = models[:, columns].to(torch.float64, copy=True)
        part -= part.mean(0)
        _add_dots(out, part, part)


def softmax_(scores: Tensor) -> Tensor:
    """Take the softmax of each row in place."""
    scores.sub_(scores.amax(1, keepdim=True)).exp_()
    return scores.div_(scores.sum(1, keepdim=True))
