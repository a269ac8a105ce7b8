"""APFL.

    @misc{deng2020adaptive,
      author = {Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
      title = {Adaptive Personalized Federated Learning},
      year = {2020},
      eprint = {2003.13461},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   m = alpha v_i + (1 - alpha) w_i;  w_i <- w_i - lr g(w_i),  v_i <- v_i - lr alpha g(m),
             adaptive: alpha_i <- clip(alpha_i - lr <v_i - w_i, g(m)>, 0, 1)
    server   as FedAvg, of w_i
    used as  m
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, ClientUpdate, Finished, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.options import Fraction
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    v: Params
    alpha: Tensor


@dataclass(frozen=True)
class APFLClient(ClientUpdate, StepMeasuring):
    """Client rule of APFL: w is shared, v and alpha stay on the client; predictions use alpha v + (1 - alpha) w.

    All three steps start from the values before the step. With `adaptive`, alpha learns too.
    """

    alpha: float = 0.5
    adaptive: bool = False

    def init_local_state(self, w0: Params) -> LocalState:
        like = next(iter(w0.values()))
        return {"v": w0, "mix": Params(alpha=torch.full((), self.alpha, dtype=like.dtype, device=like.device))}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        return _Carry(sent.params, local_state["v"], local_state["mix"]["alpha"])

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        w, v, alpha = carry
        g = grad(_interpolate(w, v, alpha), batch)
        if self.adaptive:
            slope = torch.stack([(d * g[k]).sum() for k, d in (v - w).items()]).sum()
            alpha = (alpha - context.lr * slope).clamp(0, 1)
        shared_g = grad(w, batch, statistics=False)  # only the mixture updates the statistics
        return _Carry(w - context.lr * shared_g, v - context.lr * carry.alpha * g, alpha)

    mechanisms = (Mechanism("models", "the global model", "FedAvg"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        w, v, alpha = carry
        return ((squared_norm(alpha * (v - w)), squared_norm(w)),)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return Payload(carry.w), {"v": carry.v, "mix": Params(alpha=carry.alpha)}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return _interpolate(sent.params, local_state["v"], local_state["mix"]["alpha"])

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return _interpolate(upload.params, local_state["v"], local_state["mix"]["alpha"])


def _interpolate(w: Params, v: Params, alpha: Tensor) -> Params:
    return alpha * v + (1 - alpha) * w


@method(
    Family.PERSONAL_MODEL,
    "one average",
    "SGD; mixes the average with a personal model",
    tune={"alpha": (0.25, 0.5, 0.75)},
)
def apfl(*, alpha: Fraction = 0.5, adaptive: bool = False, weighting: Weighting = "samples") -> Algorithm:
    """A mixture of a shared and a personal model, in a fixed or learned proportion.

    Source: Deng et al. (2020), Algorithm 1.

    Args:
        alpha: share alpha_i of the personal model v_i, from 0 to 1; with `adaptive`, the share at the start.
        adaptive: whether each client learns alpha_i, at every local step and with the run's learning rate.
        weighting: weights p_k in the average of the shared models: by training samples, or `uniform`.
    """
    return Algorithm(APFLClient(alpha, adaptive), Average(weighting))
