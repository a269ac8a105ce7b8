"""FedNova.

    @inproceedings{wang2020tackling,
      author = {Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
      title = {Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2020},
      eprint = {2007.07481},
      archiveprefix = {arXiv}
    }

The normalised averaging of section 4, with tau_i local steps and the weights a_i of their gradients in theta_i - w:

    client   theta_i by tau_i steps from w;  sends w + (theta_i - w) / ||a_i||_1, and ||a_i||_1
             ||a_i||_1 = tau_i for SGD,  (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) with momentum rho
    server   w <- w + tau_eff sum_S p_i (theta_i - w) / ||a_i||_1,  tau_eff = sum_S p_i ||a_i||_1

FedAvg's mean weighs the update per step by p_i ||a_i||_1 instead: clients with more steps pull w to their optimum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..client import SGD
from ..core.algorithm import Algorithm, Encoding, Finished, Measurable, ServerUpdate, SumsOnly, SumWeighting
from ..core.effect import Effect, Mechanism
from ..core.optimizers import GradientDescent, Optimizer
from ..core.options import Positive
from ..core.params import Params
from ..core.payload import LocalState, MixingMatrices, Payload, RoundContext
from ..server.average import Weighting, client_weights, mean_update, weighted_sum
from .table import Family, method


def count_effective_steps(optimizer: Optimizer, steps: Tensor) -> Tensor:
    """Return ||a||_1, the sum over local steps of the weights of their gradients in the update; Adam's count as 1."""
    rho = optimizer.momentum if isinstance(optimizer, GradientDescent) else 0.0
    if not rho:
        return steps
    # Nesterov's step looks one momentum further ahead, so each gradient has one more term of the series.
    first = rho**2 if isinstance(optimizer, GradientDescent) and optimizer.nesterov else rho
    return (steps - first * (1 - rho**steps) / (1 - rho)) / (1 - rho)


@dataclass(frozen=True)
class NormalizedSGD(SGD, Encoding):
    """Client rule of FedNova: local SGD that uploads its update per effective step, and the number of these steps.

    The trained model itself stays on the client. The inverse of the number measures the effect. The update per step is
    added to the model that the server sent, also where the client started from another one.
    """

    def init_local_state(self, w0: Params) -> LocalState:
        return {**super().init_local_state(w0), "trained": w0}

    def finish(self, carry: Any, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        upload, new_state = super().finish(carry, sent, local_state, context)
        trained, a = upload.params, count_effective_steps(self.optimizer, context.n_steps).clamp_min(1)
        w = sent.params.without(context.personal_names)
        normalized = w + (trained.only(w) - w) / a
        steps = Params(a=a, inverse=1 / a)
        return Payload(Params({**trained, **normalized}), {"steps": steps}), {**new_state, "trained": trained}

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return local_state["trained"]

    def find_base(self, sent: Payload, accepted: Payload) -> Payload:
        return sent


NORMALIZATION = Mechanism("weights", "those of FedAvg", "FedAvg, unless tau_eff is set")


class NormalizedState(TypedDict):
    """The global model, and the effect of the last round."""

    w: Params
    effect: Tensor


@dataclass(frozen=True)
class NormalizedAverage(ServerUpdate[NormalizedState], SumsOnly, Measurable):
    """Server rule of FedNova: w <- w + tau_eff sum_S p_i d_i; d_i is an update per effective step.

    The effect is the chi-square distance of p_i from FedAvg's weights of d_i, q_i = p_i ||a_i||_1 / tau_eff.
    """

    weighting: Weighting = "samples"
    tau_eff: float | None = None

    def init(self, w0: Params, n_clients: int) -> NormalizedState:
        return {"w": w0, "effect": torch.zeros((), dtype=torch.float64)}

    def aggregate(
        self, state: NormalizedState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> NormalizedState:
        p = client_weights(n, self.weighting)
        d, steps = mean_update(p, sent.params, uploads.params), weighted_sum(p, uploads.extra["steps"])
        # sum (p - q)^2 / q is the mean of ||a||_1 times the mean of its inverse, minus 1.
        effect = (steps["a"] * steps["inverse"] - 1).clamp_min(0).sqrt().double().cpu()
        tau_eff = self.tau_eff or steps["a"].clamp_min(1)  # noise on uploads may take the mean below one step
        return {"w": state["w"] + tau_eff * d, "effect": effect}

    @property
    def needed_sums(self) -> Mapping[str, SumWeighting]:
        """The means of the updates and of the steps; all clients are sent the same model."""
        return {"params": self.weighting, "steps": self.weighting}

    def measure_effects(self, state: NormalizedState, mixing: MixingMatrices | None) -> tuple[Effect, ...]:
        return (Effect(NORMALIZATION, float(state["effect"])),)


@method(Family.GLOBAL, "one average of updates per local step", "SGD; divides its update by its steps")
def fednova(*, tau_eff: Positive | None = None, weighting: Weighting = "samples") -> Algorithm:
    """FedAvg whose clients count by their updates per local step, so that more steps give no client more weight.

    Source: Wang et al. (2020), section 4.

    Args:
        tau_eff: steps tau_eff of the server along the mean update per step; None takes the mean of the clients'
            effective steps, as in the paper.
        weighting: weights p_i in both means: by training samples, as in the paper, or `uniform`.
    """
    return Algorithm(NormalizedSGD(), NormalizedAverage(weighting, tau_eff), evaluation_point="received")
