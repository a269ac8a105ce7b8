"""One client on quadratics whose solution is known."""

from typing import Any

import torch
from torch import Tensor

from fedattune import ClientUpdate, Params, Payload
from fedattune.core.algorithm import Probing
from fedattune.core.payload import LocalState, RoundContext

DIM = 4
generator = torch.Generator().manual_seed(0)
M = torch.randn(DIM, generator=generator, dtype=torch.float64)  # the minimiser
W0 = torch.randn(DIM, generator=generator, dtype=torch.float64)
A = torch.randn(DIM, generator=generator, dtype=torch.float64)  # an anchor
root = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)
H = root @ root.T / DIM + 0.1 * torch.eye(DIM)  # a Hessian
FRESH, STALE = torch.tensor(True), torch.tensor(False)


def params(w: Tensor) -> Params:
    return Params({"w": w})


def gradient(w: Params, batch: Any, statistics: bool = True) -> Params:
    """Of f = 1/2 ||w - m||^2."""
    return params(w["w"] - M)


def curved(w: Params, batch: Any, statistics: bool = True) -> Params:
    """Of f = 1/2 (w - m)^T H (w - m)."""
    return params(H @ (w["w"] - M))


def zero(w: Params, batch: Any, statistics: bool = True) -> Params:
    return w.zeros()


def run(
    rule: ClientUpdate,
    grad: Any,
    steps: int,
    lr: float,
    sent: Tensor = W0,
    own: Tensor | None = None,
    *,
    extra: dict[str, Params] | None = None,
    memory: LocalState | None = None,
    cohort: int = 1,
    round_: int = 1,
) -> tuple[Payload, LocalState]:
    """Steps of one client; a client that holds `own` was not sent anything new."""
    memory = rule.init_local_state(params(sent if own is None else own)) if memory is None else memory
    job = RoundContext(lr, torch.tensor(float(steps), dtype=torch.float64), torch.tensor(float(round_)), cohort)
    payload = Payload(params(sent), extra or {})
    carry = rule.begin(payload, memory, FRESH if own is None else STALE, job)
    batch = (torch.zeros(3, 2),) * 2
    probing = rule if rule.plan.probe and isinstance(rule, Probing) else None
    for _ in range(int(probing.probe_passes(memory)) if probing else 0):
        assert probing
        carry = probing.probe(carry, batch, grad, lambda w, batch: torch.zeros(()), job)  # type: ignore[arg-type]
    for _ in range(steps):
        carry = rule.step(carry, batch, grad, job)
    return rule.finish(carry, payload, memory, job)
