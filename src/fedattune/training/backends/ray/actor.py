"""Run clients on an actor, and the messages to and from actors.

Tensors travel as NumPy arrays, which Ray copies least.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields
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
"""A federation in a message: its large arrays, and the other fields pickled."""


class RayActor:
    """Run clients in a process of Ray; an idle actor may get other clients."""

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
    ) -> str:
        """Take over the clients `members`, and return the version."""
        self.backend = None
        torch.set_num_threads(threads)
        self.backend = open_backend(algorithm, unpack_federation(data), model, settings, members)
        return __version__

    def serve(
        self, head: dict[str, Any], names: Sequence[str], own: Arrays, shared: Arrays
    ) -> tuple[dict[str, Any], Arrays]:
        """Answer a message; see `RayMessage` for the arguments."""
        assert self.backend is not None
        tensors = to_tensors(own) | to_tensors(shared)
        reply = handle_message(self.backend, WorkerMessage(dict(head), {name: tensors[name] for name in names}))
        return reply.head, to_arrays(reply.tensors)

    def close(self) -> None:
        self.backend = None


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return tensors as arrays, which share the memory of contiguous tensors on the CPU."""
    return {k: v.detach().cpu().contiguous().numpy() for k, v in tensors.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Copy arrays to tensors: the arrays of Ray are read-only, which PyTorch does not support."""
    return {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}


def pack_federation(federation: Federation) -> PackedFederation:
    """Pack a federation for a message."""
    samples = {"x": federation.x, "y": federation.y}  # those that stay in files travel by the names of these
    large = to_arrays({name: one for name, one in samples.items() if isinstance(one, Tensor)})
    rest = {one.name: getattr(federation, one.name) for one in fields(federation) if one.name not in large}
    return large, pickle.dumps(rest)


def unpack_federation(data: PackedFederation) -> Federation:
    """Unpack a federation of `pack_federation`."""
    large, rest = data
    values: dict[str, Any] = {**to_tensors(large), **pickle.loads(rest)}  # noqa: S301 (of our own process)
    return Federation(**values)


INLINE_BYTES = 100_000
"""Bytes of arrays that travel in the call itself, Ray's own limit; larger ones go to its object store."""


class RayMessage(NamedTuple):
    """A message for one actor, packed for Ray: its head, the names of its tensors in order, and the arrays.

    `own` arrays are for this actor alone, `shared` ones for all actors; large ones are Ray's references.
    """

    head: dict[str, Any]
    names: list[str]
    own: Any
    shared: Any


def pack_messages(ray: Any, messages: Mapping[int, WorkerMessage]) -> dict[int, RayMessage]:
    """Pack messages for several actors; tensors that are the same in all of them are stored once.

    The packed messages hold copies, so the tensors may change afterwards.
    """
    first, *others = messages.values()
    common = {
        name: v
        for name, v in first.tensors.items()
        if others and all(name in m.tensors and _is_same_tensor(v, m.tensors[name]) for m in others)
    }
    shared = _put(ray, common)
    packed = {}
    for worker, message in messages.items():
        own = _put(ray, {k: v for k, v in message.tensors.items() if k not in common})
        packed[worker] = RayMessage(message.head, list(message.tensors), own, shared)
    return packed


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _put(ray: Any, tensors: Mapping[str, Tensor]) -> Any:
    arrays, nbytes = to_arrays(tensors), sum(v.numel() * v.element_size() for v in tensors.values())
    return ray.put(arrays) if nbytes > INLINE_BYTES else {k: v.copy() for k, v in arrays.items()}
