"""A client that weighs the models of others by how well they do on its own held-out data."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core import Batch, ClientUpdate, Grad, Job, Loss, Memory, Payload
from ..params import Params, choose


class _Carry(NamedTuple):
    w: Params
    start: Params
    models: Params
    losses: Tensor
    seen: Tensor
    a: Tensor


@dataclass(frozen=True)
class Choosing(ClientUpdate):
    """Move towards the candidates that are better on held-out data, in proportion to how much; then SGD.

    Source: FedFomo (Zhang et al., 2021), section 3. With theta what the client started its last local steps
    from, and M candidates theta_n, its own last model and those of others that the server rule `Peers` sends:
    a_n = (L(theta) - L(theta_n)) / (||theta_n - theta|| + 1e-5), w_n = max(a_n, 0) / sum_m max(a_m, 0),
    theta <- theta + sum_n w_n (theta_n - theta).

    Attributes:
        validation: share of the training samples that is held out for L; they are not trained on.
        fallback: where to go on if no candidate is better than theta: the client's `own` last model, or the
            `previous` theta.
        affinity: what is reported of the others: a_n as it is (`raw`), or divided by |sum_m a_m| (`normalised`).

    """

    validation: float = 0.2
    fallback: Literal["own", "previous"] = "own"
    affinity: Literal["raw", "normalised"] = "raw"

    @property
    def held_out(self) -> float:
        """The samples that L is taken on."""
        return self.validation

    @property
    def ready_after_probe(self) -> bool:
        """The received model depends on the losses of the candidates."""
        return True

    @property
    def needs(self) -> dict[str, str]:
        """The others' models, and which they are."""
        return {"peers": "Peers", "numbers": "Peers"}

    def memory(self, w0: Params) -> Memory:
        """The model that local steps last started from, and the one that they ended with."""
        return {"previous": w0, "own": w0}

    def begin(self, sent: Payload, memory: Memory, fresh: Tensor, job: Job) -> _Carry:
        """Line up theta and the candidates (M + 1, ...), with no losses yet."""
        own, peers = memory["own"], sent.extra["peers"]
        others = len(sent.extra["numbers"]["peer"])
        models = memory["previous"].map(lambda a, b: torch.stack([a, b]), own)
        for name, v in models.items():  # tensors that never leave a client are its own in every candidate
            more = peers[name] if name in peers else own[name].expand(others, *own[name].shape)
            models[name] = torch.cat([v, more])
        zeros = job.n_steps.new_zeros(2 + others)
        return _Carry(own, own, models, zeros, job.n_steps * 0, zeros[1:])

    def probe_passes(self, memory: Memory) -> Tensor:
        """One pass over the held-out samples."""
        return torch.ones(())

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, job: Job) -> _Carry:
        """The losses over the samples seen so far, and the model that they ask for."""
        x, _, *weight = batch
        more = weight[0].sum() if weight else torch.full_like(carry.seen, len(x))
        seen = carry.seen + more
        # One by one: not every model can run as a batch of models.
        each = torch.stack([loss(carry.models.rows(i), batch) for i in range(len(carry.losses))])
        losses = carry.losses + (each - carry.losses) * (more / seen)
        a = helpfulness(carry.models, losses)
        start = self._mixed(carry.models, a)
        return carry._replace(w=start, start=start, losses=losses, seen=seen, a=a)

    def _mixed(self, models: Params, a: Tensor) -> Params:
        previous, own = models.rows(0), models.rows(1)
        w = weights(a)
        moved = models.map(lambda v: v[0] + torch.tensordot(w.to(v.dtype), v[1:] - v[:1], 1))
        return choose(w.sum() > 0, moved, own if self.fallback == "own" else previous)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, job: Job) -> _Carry:
        """One gradient step."""
        return carry._replace(w=carry.w - job.lr * grad(carry.w, batch))

    def finish(self, carry: _Carry, sent: Payload, memory: Memory, job: Job) -> tuple[Payload, Memory]:
        """Upload the trained model and how much each of the others helps."""
        a = carry.a
        if self.affinity == "normalised":
            total = a.sum().abs()
            a = a / torch.where(total > 0, total, 1.0)
        upload = Payload(carry.w, {"affinity": Params(a=a[1:])})
        return upload, {"previous": carry.start, "own": carry.w}

    def received_model(self, sent: Payload, memory: Memory, fresh: Tensor) -> Params:
        """The own last model: what it is moved towards is known only after a look at the held-out data."""
        return memory["own"]


def helpfulness(models: Params, losses: Tensor) -> Tensor:
    """a_n (M,) of candidates models[1:] against models[0]; 0 for one that is the same, whatever rounding says."""
    squares = [(v[1:] - v[:1]).reshape(len(v) - 1, -1).square().sum(1) for v in models.values()]
    distance = torch.stack(squares).sum(0).sqrt()
    a = (losses[:1] - losses[1:]) / (distance + 1e-5)
    return torch.where(distance > 0, a, 0.0)


def weights(a: Tensor) -> Tensor:
    """w_n (M,): the positive part of a (M,), scaled to sum to 1; all 0 if there is none."""
    positive = a.clamp_min(0)
    total = positive.sum()
    return positive / torch.where(total > 0, total, 1.0)
