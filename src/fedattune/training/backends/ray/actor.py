"""What runs on an actor: a site, which answers parcels. Tensors cross as NumPy arrays, which Ray copies least.

Parcels packed for Ray, and what it takes to make a shard of clients again when its actor is gone.
"""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...._version import __version__
from ....core.algorithm import Algorithm
from ....core.settings import Settings
from ....data import Federation
from ..local import LocalBackend
from ..message import WorkerMessage
from ..worker import handle_message, open_backend

Arrays = dict[str, np.ndarray[Any, Any]]


PackedFederation = tuple[Arrays, bytes]
"""A federation as it crosses: its large arrays, and the rest."""


class RayActor:
    """A site on Ray, one after the other."""

    def __init__(self) -> None:
        self.backend: LocalBackend | None = None

    def open(
        self,
        algorithm: Algorithm,
        data: PackedFederation,
        model: nn.Module,
        settings: Settings,
        members: Sequence[int],
        threads: int,
    ) -> tuple[str, int]:
        """Become the site of clients `members`; tells the version here, and the process."""
        self.backend = None
        torch.set_num_threads(threads)
        self.backend = open_backend(algorithm, unpack_federation(data), model, settings, members)
        return __version__, os.getpid()

    def serve(
        self, head: dict[str, Any], names: Sequence[str], own: Arrays, shared: Arrays
    ) -> tuple[dict[str, Any], Arrays]:
        """Answer a parcel; see `Crate` for how it comes."""
        assert self.backend is not None
        found = to_tensors(own) | to_tensors(shared)
        reply = handle_message(self.backend, WorkerMessage(dict(head), {name: found[name] for name in names}))
        return reply.head, to_arrays(reply.tensors)

    def redo(self, head: dict[str, Any], names: Sequence[str], own: Arrays, shared: Arrays) -> None:
        """As `handle_message`, for what comes of it in here alone."""
        self.serve(head, names, own, shared)

    def product(self, piece: Callable[..., torch.Tensor], models: Any, rest: Any) -> Any:
        """What `piece` makes of some columns of a stack of models; see `Products`."""
        return piece(torch.from_numpy(np.array(models)), rest).numpy()

    def close(self) -> None:
        """Forget the site."""
        self.backend = None


def to_arrays(some: Mapping[str, torch.Tensor]) -> Arrays:
    """Tensors as arrays that share their memory, where they are in one piece in main memory."""
    return {k: v.detach().cpu().contiguous().numpy() for k, v in some.items()}


def to_tensors(some: Arrays) -> dict[str, torch.Tensor]:
    """Copies of arrays as tensors: those of Ray cannot be written, and a tensor that cannot is a trap."""
    return {k: torch.from_numpy(np.array(v)) for k, v in some.items()}


def pack_federation(federation: Federation) -> PackedFederation:
    """A federation as it crosses."""
    large = to_arrays({"x": federation.x, "y": federation.y})
    rest = {one.name: getattr(federation, one.name) for one in fields(federation) if one.name not in large}
    return large, pickle.dumps(rest)


def unpack_federation(data: PackedFederation) -> Federation:
    """The federation that crossed."""
    large, rest = data
    values: dict[str, Any] = {**to_tensors(large), **pickle.loads(rest)}  # noqa: S301 (of our own process)
    return Federation(**values)


INLINE_BYTES = 100_000
"""Bytes up to which arrays travel in the call itself, as Ray does by itself; more are put into its store first."""


class RayMessage(NamedTuple):
    """A parcel as it travels: its head, the names of its tensors in order, and two lots of arrays.

    These are arrays, or Ray's references to them: what is for one site alone, and what all are sent.
    """

    head: dict[str, Any]
    names: list[str]
    own: Any
    shared: Any
    nbytes: int


def pack_messages(ray: Any, parcels: Mapping[int, WorkerMessage]) -> dict[int, RayMessage]:
    """Parcels to several sites; tensors that are the same for all are put into the store once.

    What is packed does not change any more, whatever becomes of the tensors.
    """
    common = _find_shared(parcels)
    size = _nbytes(common)
    put = _put(ray, common)
    crates = {}
    for site, parcel in parcels.items():
        own = {k: v for k, v in parcel.tensors.items() if k not in common}
        crates[site] = RayMessage(
            parcel.head, list(parcel.tensors), _put(ray, own), put, _nbytes(own) + size // len(parcels)
        )
    return crates


def _find_shared(parcels: Mapping[int, WorkerMessage]) -> dict[str, Tensor]:
    """The tensors that are the same in all parcels."""
    first, *others = parcels.values()
    return {
        name: v
        for name, v in first.tensors.items()
        if others and all(name in p.tensors and _is_same_tensor(v, p.tensors[name]) for p in others)
    }


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one in memory."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _nbytes(some: Mapping[str, Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in some.values())


def _put(ray: Any, some: Mapping[str, Tensor]) -> Any:
    found: Arrays = to_arrays(some)
    if _nbytes(some) > INLINE_BYTES:
        return ray.put(found)
    return {k: v.copy() for k, v in found.items()}


@dataclass
class ActorState:
    """The clients of one actor, and what it takes to make them again.

    Attributes:
        members: their numbers.
        actor: where they are; None if they are to be made.
        pid: the actor's process.
        before: what it was told to bring its clients to where they were, until it has answered.
        saved: what puts them where they were last safe; None: they are as they begin.
        since: what was sent since then, in order.
        nbytes: of that.

    """

    members: Tensor
    actor: Any = None
    pid: int = 0
    before: list[Any] = field(default_factory=list)
    saved: RayMessage | None = None
    since: list[RayMessage] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that were sent since the clients were last safe."""
        return sum(crate.nbytes for crate in self.since)

    def note(self, crate: RayMessage) -> None:
        """Remember what was answered, if it left something on the clients or their models evaluated last."""
        kind, has_pending = crate.head["kind"], "pending" in crate.head
        if not has_pending and kind not in {"train", "evaluate"}:
            return
        if self.since and _only_evaluates(self.since[-1]) and kind in {"train", "evaluate"}:
            self.since.pop()  # a later look takes its place
        self.since.append(crate)

    def save(self, crate: RayMessage) -> None:
        """The clients are safe: `crate` brings them back."""
        self.saved, self.since = crate, []


def _only_evaluates(crate: RayMessage) -> bool:
    return crate.head["kind"] == "evaluate" and "pending" not in crate.head
