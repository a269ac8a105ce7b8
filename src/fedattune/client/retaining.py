"""Local SGD of a client that goes on with its own layers where the server says so."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import Job, Memory, Payload
from ..params import Params
from ..select import Unit, groups
from .sgd import SGD


@dataclass(frozen=True)
class Retaining(SGD):
    """Local SGD from what was sent, with the client's own last model in place of the components it retains.

    Source: pFedLA (Ma et al., 2022), HeurpFedLA. `unit` is that of the server rule `Retained`, whose flags say which
    components these are.
    """

    unit: Unit = "layer"

    @property
    def needs(self) -> dict[str, str]:
        """Which components are retained."""
        return {**super().needs, "retained": "Retained"}

    def memory(self, w0: Params) -> Memory:
        """The model as training left it, and what SGD keeps."""
        return {"last": w0, **super().memory(w0)}

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> Any:
        """Start from the received model."""
        return super().begin(self._whole(sent, memory), memory, fresh, job)

    def finish(self, carry: Any, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload the trained model, and keep it."""
        upload, kept = super().finish(carry, sent, memory, job)
        return upload, {**kept, "last": upload.params}

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """What was sent, the retained components being the client's own."""
        return super().received_model(self._whole(sent, memory), memory, fresh)

    def _whole(self, sent: Payload, memory: Memory) -> Payload:
        flags, own = sent.extra["retained"], memory["last"]
        whole = Params(sent.params)
        for component, names in groups(whole, self.unit).items():
            if component in flags:
                whole |= {k: torch.where(flags[component], own[k], whole[k]) for k in names}
        return sent._replace(params=Params(whole))
