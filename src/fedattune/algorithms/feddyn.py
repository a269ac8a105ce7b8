"""FedDyn.

    @inproceedings{acar2021federated,
      author = {Acar, Durmus Alp Emre and Zhao, Yue and Navarro, Ramon Matas and Mattina, Matthew and
        Whatmough, Paul N. and Saligrama, Venkatesh},
      title = {Federated Learning Based on Dynamic Regularization},
      booktitle = {International Conference on Learning Representations (ICLR)},
      year = {2021},
      eprint = {2111.04263},
      archiveprefix = {arXiv}
    }

Algorithm 1, with m clients and the cohort S:

    client   theta_k <- argmin L_k(theta) - <g_k, theta> + alpha/2 ||theta - w||^2, by SGD from w
             g_k <- g_k - alpha (theta_k - w)
    server   h <- h - alpha/m sum_S (theta_k - w),  w <- mean_S theta_k - h/alpha

All g_k and h are zero at the start. The server keeps z = -h/alpha, so that alpha is an option of the clients alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..client import SGD, Correction, LocalContext
from ..core.algorithm import Algorithm, Encoding, Joinable, SumsOnly, SumWeighting, change
from ..core.effect import Mechanism
from ..core.options import Positive
from ..core.params import Params, choose
from ..core.payload import LocalState, Payload
from ..server.average import client_weights, mean_update
from .table import Family, method


@dataclass(frozen=True)
class DynamicRegularization(Correction):
    """Gradient of FedDyn's local loss: g - g_k + alpha (w - sent).

    A client whose upload is not used takes plain steps and keeps its g_k: h could not follow.
    """

    alpha: float

    mechanism = Mechanism("steps", "steps without the dynamic regularizer", "FedAvg")

    def init_local_state(self, w0: Params) -> LocalState:
        return {"g": w0.zeros()}

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        """Return the corrected gradient; personal tensors stay uncorrected."""
        shared = [name for name in w if name not in local.context.personal_names]
        pull = self.alpha * (w.only(shared) - local.sent.params.only(shared))
        corrected = Params({**g, **(g.only(shared) - local.local_state["g"].only(shared) + pull)})
        return choose(local.context.is_uploaded, corrected, g)

    def finish(self, w: Params, local: LocalContext) -> tuple[dict[str, Params], LocalState]:
        own = local.local_state["g"]
        return {}, {"g": choose(local.context.is_uploaded, own - self.alpha * (w - local.sent.params), own)}


@dataclass(frozen=True)
class DynamicSGD(SGD, Encoding):
    """Client rule of FedDyn: local SGD with `DynamicRegularization`.

    Where clients may refuse models, a flag in the extra `steps` tells whether the client took plain steps.
    """

    def report_distrust(self, upload: Payload, distrusts: Tensor) -> Payload:
        like = next(iter(upload.params.values()))
        return upload._replace(extra={**upload.extra, "steps": Params(are_plain=distrusts.to(like.dtype))})


class DynamicState(TypedDict):
    """The global model, z, and the number m of clients."""

    w: Params
    z: Params
    m: Tensor


@dataclass(frozen=True)
class DynamicAverage(Joinable[DynamicState], SumsOnly):
    """Server rule of FedDyn: z <- z + 1/m sum_S (theta_k - w), w <- mean_S theta_k + z, with z = -h/alpha.

    z leaves out clients that took plain steps: they kept their g_k.
    """

    def init(self, w0: Params, n_clients: int) -> DynamicState:
        return {"w": w0, "z": w0.zeros(), "m": torch.tensor(n_clients)}

    def aggregate(self, state: DynamicState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> DynamicState:
        p = client_weights(n, "uniform")
        mean = moved = mean_update(p, sent.params, uploads.params)
        if "steps" in uploads.extra:
            are_plain = uploads.extra["steps"]["are_plain"].clamp(0, 1)  # privacy may add noise
            moved = mean_update(p * (1 - are_plain), sent.params, uploads.params)
        z = state["z"] + moved * (len(ids) / int(state["m"]))
        return change(state, w=state["w"] + mean + z, z=z)

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting]:
        """The means of the models and of the flags; all clients are sent the same model.

        From these sums, z leaves out the share of the mean update that is the share of clients with plain steps.
        """
        return {"params": "uniform", "steps": "uniform"}

    def add_clients(self, state: DynamicState, n_new: int) -> DynamicState:
        return change(state, m=state["m"] + n_new)


@method(
    Family.GLOBAL,
    "one average, moved by the sum of all past updates",
    "SGD on a loss whose optimum is that of all clients",
    tune={"alpha": (0.01, 0.1, 1.0)},
)
def feddyn(*, alpha: Positive = 0.1) -> Algorithm:
    """One average; a linear and a quadratic term align the clients' optima with the optimum of all.

    Source: Acar et al. (2021), Algorithm 1.

    Args:
        alpha: weight of the quadratic term; the paper chooses it from 0.1, 0.01 and 0.001.
    """
    return Algorithm(DynamicSGD((DynamicRegularization(alpha),)), DynamicAverage(), evaluation_point="received")
