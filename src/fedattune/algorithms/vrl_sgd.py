"""VRL-SGD.

    @misc{liang2019variance,
      author = {Liang, Xianfeng and Shen, Shuheng and Liu, Jingchang and Pan, Zhen and Chen, Enhong and
        Cheng, Yifei},
      title = {Variance Reduced Local {SGD} with Lower Communication Complexity},
      year = {2019},
      eprint = {1912.12844},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   x_i <- x_i - lr (g(x_i) - D_i), k steps;  when the mean xhat comes back,
             D_i <- D_i + (xhat - x_i) / (k lr),  x_i <- xhat
    server   xhat <- mean_i x_i over all clients

The method needs all clients in every round: then sum_i D_i = 0. With warm-up, the first round has k = 1.
"""

from dataclasses import dataclass

import torch

from ..client import SGD, Correction, LocalContext
from ..core.algorithm import Algorithm
from ..core.effect import Mechanism
from ..core.params import Params, choose
from ..core.payload import LocalState
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@dataclass(frozen=True)
class VarianceCorrection(Correction):
    """Gradient of VRL-SGD: g - D_i, where D_i <- D_i + (xhat - x_i) / (k lr) when the mean xhat comes back.

    x_i is the client's last upload, after k steps at the rate lr of the round before. A client that missed that round
    was not in the mean, so its D_i stays. A client whose upload is not used takes plain steps. With `warmup`, only the
    first step of the first round moves the model: k = 1.
    """

    warmup: bool = False

    mechanism = Mechanism("steps", "steps without the correction of drift", "FedAvg")
    suits_optimizers = False

    def init_local_state(self, w0: Params) -> LocalState:
        none = next(iter(w0.values())).new_zeros(())
        return {"D": w0.zeros(), "x": w0, "period": Params(round=none - 1, k=none + 1)}

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        corrected = choose(local.context.is_uploaded, g - self._control(local), g)
        if not self.warmup:
            return corrected
        # A model that moved has taken its one step.
        has_moved = torch.stack([(w[k] != local.start[k]).any() for k in w]).any()
        return choose((local.context.round == 1) & has_moved, corrected.zeros(), corrected)

    def finish(self, w: Params, local: LocalContext) -> tuple[dict[str, Params], LocalState]:
        last = local.local_state["period"]["round"]
        k = local.context.n_steps.to(last.dtype)
        if self.warmup:
            k = torch.where(local.context.round == 1, torch.ones_like(k), k)
        # An upload that is not used is no part of the mean.
        now = torch.where(local.context.is_uploaded, local.context.round.to(last.dtype), last)
        period = Params(round=now, k=k)
        return {}, {"D": self._control(local), "x": w, "period": period}

    def _control(self, local: LocalContext) -> Params:
        """Return D_i of this round: changed if the client was in the last mean."""
        period = local.local_state["period"]
        change = (local.sent.params - local.local_state["x"]) / (period["k"] * local.context.last_lr)
        was_there = period["round"] == local.context.round - 1
        return local.local_state["D"] + choose(was_there, change, change.zeros())


@method(Family.GLOBAL, "one average", "SGD corrected for the client's drift")
def vrl_sgd(*, warmup: bool = False, weighting: Weighting = "uniform") -> Algorithm:
    """One average; each client corrects its gradients by its past distance from the average.

    Source: Liang et al. (2019), Algorithm 1.

    Args:
        warmup: whether only the first local step of the first round moves the client (k = 1), the paper's warm-up.
        weighting: weights of the clients in the mean xhat: `uniform`, as in the paper, or by training samples.
    """
    return Algorithm(
        SGD((VarianceCorrection(warmup),)), Average(weighting), evaluation_point="received", full_participation=True
    )
