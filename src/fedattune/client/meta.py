"""Per-FedAvg's local loop: steps on the loss after one step of adaptation."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Job, Memory, Payload
from ..params import Params


@dataclass(frozen=True)
class Meta(ClientUpdate):
    """w <- w - beta d/dw f(w - alpha g(w; B)), its Hessian part left out (fo) or by differences (hf).

    v = w - alpha g(w; B), u = g(v; B');  fo: w <- w - beta u;
    hf: w <- w - beta (u - alpha (g(w + delta u; B'') - g(w - delta u; B'')) / (2 delta)).
    Source: Per-FedAvg (Fallah et al., 2020), equations 6 and 9 to 11. `None` rates are the run's learning rate.
    """

    alpha: float | None = None
    beta: float | None = None
    hessian: Literal["fo", "hf"] = "fo"
    delta: float = 1e-3

    @property
    def batches_per_step(self) -> int:
        """B, B' and, for the Hessian-free form, B''."""
        return 2 if self.hessian == "fo" else 3

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> Params:
        """Start from what was sent."""
        return sent.params

    def step(self, carry: Params, batch: Batch, grad: Grad, job: Job) -> Params:
        """One meta step on its own two or three batches."""
        w = carry
        first, second, *third = (tuple(t[i] for t in batch) for i in range(self.batches_per_step))
        alpha = job.lr if self.alpha is None else self.alpha
        beta = job.lr if self.beta is None else self.beta
        u = grad(w - alpha * grad(w, first), second)
        if not third:
            return w - beta * u
        h = (grad(w + self.delta * u, third[0]) - grad(w - self.delta * u, third[0])) / (2 * self.delta)
        return w - beta * (u - alpha * h)

    def finish(self, carry: Params, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload w."""
        return Payload(carry), memory

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """What was sent, before adaptation."""
        return sent.params
