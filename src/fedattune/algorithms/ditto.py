"""Ditto.

    @inproceedings{li2021ditto,
      author = {Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
      title = {{Ditto}: Fair and Robust Federated Learning Through Personalization},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2021},
      eprint = {2012.04221},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   w_i <- w, then SGD;  v_i <- v_i - lr (g(v_i) + lam (v_i - w)), w as received, on the same batches
    server   as FedAvg, of w_i
    used as  v_i
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..client import SGD, Optimizing
from ..core.algorithm import Algorithm, Finished, LocalPlan, Probing, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.optimizers import Optimizer
from ..core.options import NonNegative, Positive
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


class _Carry(NamedTuple):
    shared: Any
    v: Params
    anchor: Params
    optimizer: LocalState  # of v


@dataclass(frozen=True)
class DittoClient(Optimizing, Probing, StepMeasuring):
    """Client rule of Ditto: trains a personal model v beside the model of any SGD rule, on the same batches.

    `shared` trains and uploads w, with any corrections. The state of an optimizer of w restarts in every round.
    """

    lam: float
    personal_lr: float | None = None
    shared: SGD = field(default_factory=SGD)

    @property
    def plan(self) -> LocalPlan:
        return self.shared.plan

    @property
    def own_steps(self) -> str | None:
        return self.shared.own_steps or super().own_steps

    def with_optimizer(self, optimizer: Optimizer) -> Self:
        # What w learns is averaged away in every round, and the names of two kept states would clash.
        return replace(self, optimizer=optimizer, shared=self.shared.with_optimizer(optimizer.restart()))

    def init_local_state(self, w0: Params) -> LocalState:
        return {**self.shared.init_local_state(w0), **self.optimizer.init_local_state(w0), "v": w0}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        shared, v = self.shared.begin(sent, local_state, fresh, context), local_state["v"]
        return _Carry(shared, v, sent.params, self.optimizer.begin(v, local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        return carry._replace(shared=self.shared.probe(carry.shared, batch, grad, loss, context))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        shared, v, anchor, state = carry
        lr = context.lr if self.personal_lr is None else self.personal_lr
        v, state = self.optimizer.step(v, grad(v, batch) + self.lam * (v - anchor), state, lr)
        shared_grad = partial(grad, statistics=False)  # only v updates the statistics: it predicts
        return _Carry(self.shared.step(shared, batch, shared_grad, context), v, anchor, state)

    mechanisms = (Mechanism("steps", "steps without the pull to the received model", "training alone"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        pull = self.lam * (carry.v - carry.anchor)
        return ((squared_norm(pull), squared_norm(grad(carry.v, batch, statistics=False))),)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        upload, shared_state = self.shared.finish(carry.shared, sent, local_state, context)
        return upload, {**shared_state, **self.optimizer.keep(carry.optimizer), "v": carry.v}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return local_state["v"]

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return local_state["v"]


@method(
    Family.PERSONAL_MODEL,
    "one average",
    "SGD; trains a personal model near the average",
    tune={"lam": (0.1, 1.0, 10.0)},
)
def ditto(
    *, lam: NonNegative = 1.0, personal_lr: Positive | None = None, weighting: Weighting = "samples"
) -> Algorithm:
    """A personal model near the global model; the personal model does not affect the global one.

    Source: Li et al. (2021), Algorithm 1.

    Args:
        lam: strength lambda of the pull of v_i to the received w; the paper tries 0.1, 1 and 2. 0 trains v_i alone.
        personal_lr: learning rate of v_i; None takes the run's learning rate.
        weighting: weights p_k in the average of the shared models: by training samples, or `uniform`.
    """
    return Algorithm(DittoClient(lam, personal_lr), Average(weighting))
