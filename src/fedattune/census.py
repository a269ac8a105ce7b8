"""What a server knows of clients whose data it never sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .data.members import PARTS, Part


@dataclass(frozen=True)
class Census:
    """The clients of a real federation: their names and numbers of samples, and what a model for them is like.

    It stands in for a `Federation` where no data are looked at. `counts` are (N, 3), in the order of `PARTS`.
    """

    name: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    partition: Mapping[str, Any] = field(default_factory=lambda: {"name": "given"})

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.names)

    def sizes(self, part: Part) -> torch.Tensor:
        """Each client's number of samples in one part, int64 (N,)."""
        place = PARTS.index(part)
        return torch.tensor([row[place] for row in self.counts], dtype=torch.int64)

    def to(self, device: torch.device | str) -> "Census":
        """Itself: there is nothing to move."""
        return self
