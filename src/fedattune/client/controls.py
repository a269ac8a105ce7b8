"""SCAFFOLD's correction: control variates take the client's own drift out of its gradients."""

from dataclasses import dataclass
from typing import Literal

from ..core import Memory
from ..params import Params, choose
from .sgd import Correction, Local


@dataclass(frozen=True)
class ControlVariates(Correction):
    """g - c_i + c, where c is the server's and c_i the client's control variate.

    After K steps from w to y: c_i <- c_i - c + (w - y) / (K lr) (option II), or the gradient at w over all training
    samples (option I); the change of c_i is uploaded. Source: SCAFFOLD (Karimireddy et al., 2020), equations 3
    and 4. The server must be wrapped in `server.Controls`, which keeps and sends c. A client that
    the server will not hear of takes plain steps and keeps its c_i: c could not follow.
    """

    option: Literal["I", "II"] = "II"

    @property
    def needs(self) -> dict[str, str]:
        """The server's control variate."""
        return {"c": "Controls"}

    @property
    def needs_full_gradient(self) -> bool:
        """Option I does."""
        return self.option == "I"

    def memory(self, w0: Params) -> Memory:
        """Start with c_i = 0."""
        return {"c": w0.zeros()}

    def __call__(self, g: Params, w: Params, local: Local) -> Params:
        """The corrected gradient; tensors that are not shared keep their own."""
        c = local.sent.extra["c"]
        corrected = Params({**g, **(g.only(c) - local.memory["c"].only(c) + c)})
        return choose(local.job.heard, corrected, g)

    def finish(self, w: Params, local: Local) -> tuple[dict[str, Params], Memory]:
        """Upload the change of c_i, and keep the new one."""
        c = local.sent.extra["c"]
        own = local.memory["c"].only(c)
        if self.option == "I":
            new = local.full_gradient.only(c)
        else:
            new = own - c + (local.start - w).only(c) / (local.job.n_steps * local.job.lr)
        new = choose(local.job.heard, new, own)
        return {"dc": new - own}, {"c": Params({**local.memory["c"], **new})}
