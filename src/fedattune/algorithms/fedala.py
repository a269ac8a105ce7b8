"""FedALA.

    @inproceedings{zhang2023fedala,
      author = {Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and
        Guan, Haibing},
      title = {{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
      booktitle = {AAAI Conference on Artificial Intelligence},
      year = {2023},
      eprint = {2212.01197},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   theta_i <- theta_i^old + (w - theta_i^old) * U_i in the upper layers, w below; then SGD; uploads theta_i
             before, on a share of the samples:  U_i <- clip(U_i - eta g(theta_i) * (w - theta_i^old), 0, 1)
    server   as FedAvg
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from ..client import Optimizing
from ..core.algorithm import Algorithm, Finished, LocalPlan, Probe, Probing, Resting, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.options import Count, NonNegative
from ..core.params import Params, choose, squared_norm
from ..core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext
from ..core.selectors import group_names
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


class _Carry(NamedTuple):
    w: Params
    U: Params
    sent: Params
    old: Params
    optimizer: LocalState


@dataclass(frozen=True)
class FedALAClient(Optimizing, Probing, Resting, StepMeasuring):
    """Client rule of FedALA: mixes the upper layers of the old and the received model by learned weights U; then SGD.

    U learns batch by batch before training: not in the client's first round, `first_passes` times in its second round,
    once in later rounds. Options: see `fedala`.
    """

    layers: int = 1
    eta: float = 1.0
    share: float = 0.8
    first_passes: int = 11

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(probe=Probe(share=self.share, makes_received_model=True))

    def init_local_state(self, w0: Params) -> LocalState:
        top = w0.only(self._top(w0))
        count = next(iter(w0.values())).new_zeros(())
        own = {"own": w0, "U": top.map(lambda a: a.new_ones(a.shape)), "trained": Params(rounds=count)}
        return {**own, **self.optimizer.init_local_state(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        top = self._top(sent.params)
        w = self.received_model(sent, local_state, fresh)
        old, state = local_state["own"].only(top), self.optimizer.begin(w, local_state)
        return _Carry(w, local_state["U"], sent.params.only(top), old, state)

    def probe_passes(self, local_state: LocalState) -> Tensor:
        rounds = local_state["trained"]["rounds"]
        return (rounds > 0) + (self.first_passes - 1) * (rounds == 1)

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        w, U, sent, old, _ = carry
        g = grad(w, batch).only(U)
        U = (U - self.eta * g * (sent - old)).map(lambda a: a.clamp(0, 1))
        return carry._replace(w=Params({**w, **(old + (sent - old) * U)}), U=U)

    mechanisms = (Mechanism("starts", "the received model", "FedAvg"),)

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        difference = carry.sent - carry.old
        kept = difference.map(lambda a, b: a * (1 - b), carry.U)
        return ((squared_norm(kept), squared_norm(difference)),)

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        own = {"own": carry.w, "U": carry.U, "trained": local_state["trained"] + 1}
        return Payload(carry.w), {**own, **self.optimizer.keep(carry.optimizer)}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        top = self._top(sent.params)
        new, old = sent.params.only(top), local_state["own"].only(top)
        mixture = choose(local_state["trained"]["rounds"] > 0, old + (new - old) * local_state["U"], new)
        return Params({**sent.params, **mixture})

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return choose(local_state["trained"]["rounds"] > 0, local_state["own"], sent.params)

    def _top(self, names: Iterable[str]) -> list[str]:
        modules = list(group_names(names, "layer").values())
        return [name for module in modules[-self.layers :] for name in module]


@method(
    Family.ADAPTED, "one average", "learns how much of its upper layers to take over; SGD", tune={"eta": (0.1, 1.0)}
)
def fedala(
    *,
    layers: Count = 1,
    eta: NonNegative = 1.0,
    share: Annotated[float, Field(gt=0, le=1)] = 0.8,
    first_passes: Count = 11,
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg whose clients learn how much of each value of the upper layers to take over.

    Source: Zhang et al. (2023), Algorithm 1.

    Args:
        layers: number of layers that U_i mixes, counted from the last; a layer is a module with parameters of its own.
        eta: learning rate eta of U_i; 0 keeps U_i = 1, which is FedAvg.
        share: share of the client's training samples for learning U_i, drawn anew in every round.
        first_passes: passes over these samples in the client's second round; later rounds have one pass. The paper
            repeats until convergence; public code takes 11 passes at least.
        weighting: weights p_k in the average: by training samples, or `uniform`.
    """
    return Algorithm(FedALAClient(layers, eta, share, first_passes), Average(weighting), evaluation_point="received")
