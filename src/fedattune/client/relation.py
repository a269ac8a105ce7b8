"""MOCHA's regulariser as a correction of SGD."""

from dataclasses import dataclass

from ..params import Params
from .sgd import Correction, Local


@dataclass(frozen=True)
class Relation(Correction):
    """Gradient of lam1 tr(W Omega W^T) + lam2 ||W||^2 at the own model w_t, the others' models as last uploaded.

    For servers that send sum_{s != t} Omega_st w_s, and Omega_tt as `extra["omega"]["own"]` (`server.Relations`).
    Tensors that never leave the client are in no relation. Source: MOCHA (Smith et al., 2017), equation 1.
    """

    lam1: float
    lam2: float

    @property
    def needs(self) -> dict[str, str]:
        """What the server says of the client's own model."""
        return {"omega": "Relations"}

    def __call__(self, g: Params, w: Params, local: Local) -> Params:
        """The gradient g + 2 lam1 (W Omega)_t + 2 lam2 w."""
        sent, own = local.sent, local.sent.extra["omega"]["own"]
        personal = set(local.job.personal)
        bent = {}
        for k, v in w.items():
            related = 0.0 if k in personal else self.lam1 * (sent.params[k] + own * v)
            bent[k] = g[k] + 2 * related + 2 * self.lam2 * v
        return Params(bent)
