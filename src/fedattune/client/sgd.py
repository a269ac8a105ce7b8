"""Local SGD, and corrections that bend its gradient."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Memory, Payload, newest
from ..params import Params

Start = Literal["sent", "newest"]
"""Where local training starts: what was sent, or the client's own last model unless something new was sent."""


@dataclass(frozen=True)
class Correction(ABC):
    """Bends the gradient of local SGD."""

    def memory(self, w0: Params) -> Memory:
        """What the correction keeps on the client."""
        return {}

    @abstractmethod
    def __call__(self, g: Params, w: Params, sent: Payload, memory: Memory) -> Params:
        """The bent gradient at w."""

    def finish(
        self, w: Params, sent: Payload, memory: Memory, n_steps: Tensor, lr: float
    ) -> tuple[dict[str, Params], Memory]:
        """Extras to upload and new memory after training ended at w."""
        return {}, {}


@dataclass(frozen=True)
class Proximal(Correction):
    """Gradient of mu/2 ||w - anchor||^2; the anchor is what was last sent and stays fixed while training."""

    mu: float

    def __call__(self, g: Params, w: Params, sent: Payload, memory: Memory) -> Params:
        """The gradient g + mu (w - anchor)."""
        return g + self.mu * (w - sent.params)


class _Carry(NamedTuple):
    w: Params
    sent: Payload
    memory: Memory


@dataclass(frozen=True)
class SGD(ClientUpdate):
    """w <- w - lr g(w; batch), the gradient bent by corrections in their order."""

    corrections: tuple[Correction, ...] = ()
    start: Start = "sent"

    def memory(self, w0: Params) -> Memory:
        """The corrections' memory, and the own model if training can start from it."""
        kept: Memory = {"own": w0} if self.start == "newest" else {}
        for correction in self.corrections:
            kept |= correction.memory(w0)
        return kept

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor) -> _Carry:
        """Start from the received model."""
        return _Carry(self.received_model(sent, memory, fresh), sent, memory)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, lr: float) -> _Carry:
        """One corrected gradient step."""
        g = grad(carry.w, batch)
        for correct in self.corrections:
            g = correct(g, carry.w, carry.sent, carry.memory)
        return carry._replace(w=carry.w - lr * g)

    def finish(
        self, carry: _Carry, sent: Payload, memory: Memory, n_steps: Tensor, lr: float
    ) -> tuple[Payload, Memory]:
        """Upload the trained model and the corrections' extras."""
        extra: dict[str, Params] = {}
        kept = dict(memory)
        for correction in self.corrections:
            more, changed = correction.finish(carry.w, sent, memory, n_steps, lr)
            extra |= more
            kept |= changed
        if self.start == "newest":
            kept["own"] = carry.w
        return Payload(carry.w, extra), kept

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """What was sent, or with `start="newest"` the own model when nothing new was sent."""
        return newest(sent.params, memory["own"], fresh) if self.start == "newest" else sent.params
