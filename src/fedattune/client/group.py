"""IGFL's correction: every local step also carries what the group did in the round before."""

from dataclasses import dataclass

from ..core import Memory
from ..params import Params, choose
from .sgd import Correction, Local


@dataclass(frozen=True)
class IndividualAndGroup(Correction):
    """A step of dI + dG: dI = -lr g, dG = (dI - Delta_i / T) / |S| + D / T, for T local steps.

    D is the global model's last displacement, which the server sends, Delta_i the client's own last update. As a
    gradient: g + (g + Delta_i / (lr T)) / |S| - D / (lr T). Source: IGFL (Huang et al., 2021), Algorithm 2. Delta_i
    is that of the last round in which the client took part, times `stale_decay` for every round that it missed.
    One that the server will not hear of is no part of the group: it takes plain steps.
    """

    stale_decay: float = 1.0

    @property
    def needs(self) -> dict[str, str]:
        """The global model's displacement."""
        return {"D": "Displacement"}

    def memory(self, w0: Params) -> Memory:
        """No update yet: zeros, as of round 0."""
        return {"delta": w0.zeros(), "delta_round": Params(round=next(iter(w0.values())).new_zeros(()))}

    def __call__(self, g: Params, w: Params, local: Local) -> Params:
        """The gradient with the group's part; tensors that are not shared have none."""
        displacement, job = local.sent.extra["D"], local.job
        own = g.only(displacement)
        missed = job.round - 1 - local.memory["delta_round"]["round"]
        delta = local.memory["delta"].only(displacement) * self.stale_decay**missed
        length = job.lr * job.n_steps
        bent = Params({**g, **(own + (own + delta / length) / job.cohort - displacement / length)})
        return choose(job.heard, bent, g)

    def finish(self, w: Params, local: Local) -> tuple[dict[str, Params], Memory]:
        """Keep this round's update, and which round it was."""
        last = local.memory["delta_round"]["round"]
        now = Params(round=local.job.round.to(last.dtype))
        new = {"delta": w - local.start, "delta_round": now}
        return {}, {k: choose(local.job.heard, v, local.memory[k]) for k, v in new.items()}
