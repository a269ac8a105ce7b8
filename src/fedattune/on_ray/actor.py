"""What runs on an actor: a site, which answers parcels. Tensors cross as NumPy arrays, which Ray copies least."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import nn

from .._version import __version__
from ..config import Settings
from ..core import Algorithm
from ..data import Federation
from ..serving import open_site, serve
from ..site import Site
from ..wire import Parcel

Arrays = dict[str, np.ndarray[Any, Any]]

Data = tuple[Arrays, bytes]
"""A federation as it crosses: its large arrays, and the rest."""


class Actor:
    """A site on Ray, one after the other."""

    def __init__(self) -> None:
        self.site: Site | None = None

    def open(
        self,
        algorithm: Algorithm,
        data: Data,
        model: nn.Module,
        settings: Settings,
        members: Sequence[int],
        threads: int,
    ) -> tuple[str, int]:
        """Become the site of clients `members`; tells the version here, and the process."""
        self.site = None
        torch.set_num_threads(threads)
        self.site = open_site(algorithm, unpacked_data(data), model, settings, members)
        return __version__, os.getpid()

    def serve(
        self, head: dict[str, Any], names: Sequence[str], own: Arrays, shared: Arrays
    ) -> tuple[dict[str, Any], Arrays]:
        """Answer a parcel; see `Crate` for how it comes."""
        assert self.site is not None
        found = tensors(own) | tensors(shared)
        reply = serve(self.site, Parcel(dict(head), {name: found[name] for name in names}))
        return reply.head, arrays(reply.tensors)

    def redo(self, head: dict[str, Any], names: Sequence[str], own: Arrays, shared: Arrays) -> None:
        """As `serve`, for what comes of it in here alone."""
        self.serve(head, names, own, shared)

    def product(self, piece: Callable[..., torch.Tensor], models: Any, rest: Any) -> Any:
        """What `piece` makes of some columns of a stack of models; see `Products`."""
        return piece(torch.from_numpy(np.array(models)), rest).numpy()

    def close(self) -> None:
        """Forget the site."""
        self.site = None


def arrays(some: Mapping[str, torch.Tensor]) -> Arrays:
    """Tensors as arrays that share their memory, where they are in one piece in main memory."""
    return {k: v.detach().cpu().contiguous().numpy() for k, v in some.items()}


def tensors(some: Arrays) -> dict[str, torch.Tensor]:
    """Copies of arrays as tensors: those of Ray cannot be written, and a tensor that cannot is a trap."""
    return {k: torch.from_numpy(np.array(v)) for k, v in some.items()}


def packed_data(federation: Federation) -> Data:
    """A federation as it crosses."""
    large = arrays({"x": federation.x, "y": federation.y})
    rest = {one.name: getattr(federation, one.name) for one in fields(federation) if one.name not in large}
    return large, pickle.dumps(rest)


def unpacked_data(data: Data) -> Federation:
    """The federation that crossed."""
    large, rest = data
    values: dict[str, Any] = {**tensors(large), **pickle.loads(rest)}  # noqa: S301 (of our own process)
    return Federation(**values)
