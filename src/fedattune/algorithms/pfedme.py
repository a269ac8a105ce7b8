"""pFedMe.

    @inproceedings{dinh2020personalized,
      author = {Dinh, Canh T. and Tran, Nguyen H. and Nguyen, Tuan Dung},
      title = {Personalized Federated Learning with {M}oreau Envelopes},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2020},
      eprint = {2006.08848},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   K times theta <- theta - personal_lr (g(theta) + lam (theta - w_i)) on one batch,
             then w_i <- w_i - lr lam (w_i - theta); all clients train, the cohort uploads w_i
    server   w <- (1 - beta) w + beta sum_k p_k w_k, sent to all clients
    used as  theta (`trained`, the paper's PM); w is the paper's GM (`received`)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import (
    Algorithm,
    ClientUpdate,
    Finished,
    Participation,
    Resting,
    StepChanges,
    StepMeasuring,
    pick_newest,
)
from ..core.effect import Mechanism
from ..core.options import Count, NonNegative, Positive
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    theta: Params


@dataclass(frozen=True)
class PFedMeClient(ClientUpdate, Resting, StepMeasuring):
    """Client rule of pFedMe: theta ~ argmin f(theta) + lam/2 ||theta - w||^2 by K steps on one batch; w follows theta.

    theta starts at w in the first step of a round and continues from there, as in the public code. The paper does not
    specify the inner solver.
    """

    lam: float
    K: int
    personal_lr: float
    start: Literal["sent", "newest"] = "sent"

    def init_local_state(self, w0: Params) -> LocalState:
        return {"theta": w0} | ({"own": w0} if self.start == "newest" else {})

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        w = self.received_model(sent, local_state, fresh)
        return _Carry(w, w)

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        w, theta = carry
        for _ in range(self.K):
            theta = theta - self.personal_lr * (grad(theta, batch) + self.lam * (theta - w))
        return _Carry(w - context.lr * self.lam * (w - theta), theta)

    mechanisms = (Mechanism("steps", "steps without the pull to the shared model", "training without the pull"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        w, theta = carry
        pulls = norms = torch.zeros_like(context.n_steps)
        for _ in range(self.K):
            g, pull = grad(theta, batch, statistics=False), self.lam * (theta - w)
            pulls, norms = pulls + squared_norm(pull), norms + squared_norm(g)
            theta = theta - self.personal_lr * (g + pull)
        return ((pulls, norms),)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        new_state: LocalState = {"theta": carry.theta}
        if self.start == "newest":
            new_state["own"] = carry.w
        return Payload(carry.w), new_state

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return pick_newest(sent.params, local_state["own"], fresh) if self.start == "newest" else sent.params

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return local_state["theta"]

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return local_state["theta"]


@method(
    Family.PERSONAL_MODEL,
    "one average",
    "trains a personal model near the average",
    tune={"lam": (5.0, 15.0, 30.0), "personal_lr": (0.01, 0.05, 0.1)},
)
def pfedme(
    *,
    lam: NonNegative = 15.0,
    K: Count = 5,
    personal_lr: Positive = 0.05,
    beta: NonNegative = 1.0,
    weighting: Weighting = "samples",
) -> Algorithm:
    """Personal models by Moreau envelopes around one global model.

    Source: Dinh et al. (2020), Algorithm 1.

    Args:
        lam: strength lambda of the pull of theta_i to w_i; also a factor of w_i's step. FedMCSA's comparison has 5.
        K: steps of theta_i per local step, all on the same batch; the work grows K times.
        personal_lr: learning rate of theta_i. The paper leaves the solver of theta_i open.
        beta: step beta of the server: 1 replaces w by the average, 0 never changes w.
        weighting: weights p_k in the average: by training samples, as in public code, or `uniform`, as in the paper.
    """
    return Algorithm(
        PFedMeClient(lam, K, personal_lr),
        Average(weighting, beta),
        participation=Participation(train="all", receive="all"),
    )
