"""Local SGD on the personal part of the model first, then on the shared part."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Job, Memory, Payload
from ..params import Params


class _Carry(NamedTuple):
    w: Params
    velocity: Params
    t: Tensor


@dataclass(frozen=True)
class Alternating(ClientUpdate):
    """The round's local work `personal` times on the tensors that never leave the client, `shared` times on the rest.

    Source: FedRep (Collins et al., 2021), Algorithm 1. What is not trained stays exactly as it is. With `momentum`,
    v <- momentum v + g for the part that is trained, from v = 0 in every round.
    """

    personal: int
    shared: int
    momentum: float = 0.0

    @property
    def passes(self) -> int:
        """Both phases."""
        return self.personal + self.shared

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> _Carry:
        """Start from what was sent."""
        return _Carry(sent.params, sent.params.zeros(), torch.zeros_like(job.n_steps))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, job: Job) -> _Carry:
        """One gradient step of the phase's part."""
        w, velocity, t = carry
        first = t * self.passes < job.n_steps * self.personal
        v = self.momentum * velocity + grad(w, batch)
        moves = Params({k: first if k in job.personal else ~first for k in w})
        velocity = moves.map(torch.where, v, velocity)
        return _Carry(moves.map(torch.where, w - job.lr * v, w), velocity, t + 1)

    def finish(self, carry: _Carry, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload the trained model."""
        return Payload(carry.w), memory

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """What was sent, with the client's own personal part."""
        return sent.params
