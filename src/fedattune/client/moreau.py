"""pFedMe's local loop: gradient steps on the Moreau envelope of the client's loss."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Job, Memory, Payload, newest
from ..params import Params


class _Carry(NamedTuple):
    w: Params
    theta: Params


@dataclass(frozen=True)
class Moreau(ClientUpdate):
    """theta ~ argmin f(theta) + lam/2 ||theta - w||^2 by K steps on one batch; then w <- w - lr lam (w - theta).

    Source: pFedMe (Dinh et al., 2020), Algorithm 1. theta starts at w in the first step of a round and goes on
    from there, as in the public code (the paper leaves the inner solver open).
    """

    lam: float
    K: int
    personal_lr: float
    start: Literal["sent", "newest"] = "sent"

    def memory(self, w0: Params) -> Memory:
        """The personal model theta, and the own local model if training can start from it."""
        return {"theta": w0} | ({"own": w0} if self.start == "newest" else {})

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> _Carry:
        """Both models start from the received one."""
        w = self.received_model(sent, memory, fresh)
        return _Carry(w, w)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, job: Job) -> _Carry:
        """K proximal steps of theta on the same batch, then one step of w towards theta."""
        w, theta = carry
        for _ in range(self.K):
            theta = theta - self.personal_lr * (grad(theta, batch) + self.lam * (theta - w))
        return _Carry(w - job.lr * self.lam * (w - theta), theta)

    def finish(self, carry: _Carry, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload w, keep theta."""
        kept: Memory = {"theta": carry.theta}
        if self.start == "newest":
            kept["own"] = carry.w
        return Payload(carry.w), kept

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The local model w before training: what was sent (the paper's GM), or the own one."""
        return newest(sent.params, memory["own"], fresh) if self.start == "newest" else sent.params

    def trained_model(self, upload: Payload, memory: Memory) -> Params:
        """The personal model theta (the paper's PM)."""
        return memory["theta"]

    def resting_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The personal model of the last round in which the client trained."""
        return memory["theta"]
