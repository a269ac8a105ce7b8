"""Parcels packed for Ray, and what it takes to make a shard of clients again when its actor is gone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..wire import Parcel
from .actor import Arrays, arrays

IN_CALL = 100_000
"""Bytes up to which arrays travel in the call itself, as Ray does by itself; more are put into its store first."""


class Crate(NamedTuple):
    """A parcel as it travels: its head, the names of its tensors in order, and two lots of arrays.

    These are arrays, or Ray's references to them: what is for one site alone, and what all are sent.
    """

    head: dict[str, Any]
    names: list[str]
    own: Any
    shared: Any
    nbytes: int


def packed(ray: Any, parcels: Mapping[int, Parcel]) -> dict[int, Crate]:
    """Parcels to several sites; tensors that are the same for all are put into the store once.

    What is packed does not change any more, whatever becomes of the tensors.
    """
    common = _shared(parcels)
    size = _nbytes(common)
    put = _put(ray, common)
    crates = {}
    for site, parcel in parcels.items():
        own = {k: v for k, v in parcel.tensors.items() if k not in common}
        crates[site] = Crate(
            parcel.head, list(parcel.tensors), _put(ray, own), put, _nbytes(own) + size // len(parcels)
        )
    return crates


def _shared(parcels: Mapping[int, Parcel]) -> dict[str, Tensor]:
    """The tensors that are the same in all parcels."""
    first, *others = parcels.values()
    return {
        name: v
        for name, v in first.tensors.items()
        if others and all(name in p.tensors and _same(v, p.tensors[name]) for p in others)
    }


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one in memory."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _nbytes(some: Mapping[str, Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in some.values())


def _put(ray: Any, some: Mapping[str, Tensor]) -> Any:
    found: Arrays = arrays(some)
    if _nbytes(some) > IN_CALL:
        return ray.put(found)
    return {k: v.copy() for k, v in found.items()}


@dataclass
class Shard:
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
    saved: Crate | None = None
    since: list[Crate] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that were sent since the clients were last safe."""
        return sum(crate.nbytes for crate in self.since)

    def note(self, crate: Crate) -> None:
        """Remember what was answered, if it left something on the clients or their models evaluated last."""
        kind, held = crate.head["kind"], "held" in crate.head
        if not held and kind not in {"train", "evaluate"}:
            return
        if self.since and _only_looks(self.since[-1]) and kind in {"train", "evaluate"}:
            self.since.pop()  # a later look takes its place
        self.since.append(crate)

    def save(self, crate: Crate) -> None:
        """The clients are safe: `crate` brings them back."""
        self.saved, self.since = crate, []


def _only_looks(crate: Crate) -> bool:
    return crate.head["kind"] == "evaluate" and "held" not in crate.head
