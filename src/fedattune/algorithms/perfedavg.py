"""Per-FedAvg.

    @inproceedings{fallah2020personalized,
      author = {Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
      title = {Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
        Approach},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2020},
      eprint = {2002.07948},
      archiveprefix = {arXiv}
    }

Algorithm 1:

    client   v = w - alpha g(w; B);  w <- w - beta g(v; B')      (fo; hf adds the Hessian by differences)
    server   as FedAvg
    used as  w after one step (or `adapt_steps`) of rate alpha on the client's own data
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from ..core.algorithm import Algorithm, ClientUpdate, FineTune, Finished, LocalPlan, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.options import Count, Positive
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..server import Average
from ..server.average import Weighting
from .table import Family, method


@dataclass(frozen=True)
class PerFedAvgClient(ClientUpdate, StepMeasuring):
    """Client rule of Per-FedAvg: descends the loss after one step (equations 6 and 9 to 11).

    With v = w - alpha g(w; B) and u = g(v; B'), `fo` steps along u and leaves out the Hessian. `hf` steps along
    u - alpha (g(w + delta u; B'') - g(w - delta u; B'')) / (2 delta). Rates of None are the run's learning rate.
    """

    alpha: float | None = None
    beta: float | None = None
    hessian: Literal["fo", "hf"] = "fo"
    delta: float = 1e-3

    @property
    def plan(self) -> LocalPlan:
        return LocalPlan(batches_per_step=2 if self.hessian == "fo" else 3)

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Params:
        return sent.params

    def step(self, carry: Params, batch: Batch, grad: Grad, context: RoundContext) -> Params:
        w = carry
        first, second, *third = (tuple(t[i] for t in batch) for i in range(self.plan.batches_per_step))
        alpha = context.lr if self.alpha is None else self.alpha
        beta = context.lr if self.beta is None else self.beta
        u = grad(w - alpha * grad(w, first), second)
        if not third:
            return w - beta * u
        h = (grad(w + self.delta * u, third[0]) - grad(w - self.delta * u, third[0])) / (2 * self.delta)
        return w - beta * (u - alpha * h)

    mechanisms = (Mechanism("steps", "plain gradient steps", "FedAvg with fine-tuning"),)

    def measure_step(self, carry: Params, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        plain = grad(carry, tuple(t[1] for t in batch), statistics=False)
        beta = context.lr if self.beta is None else self.beta
        quiet = partial(grad, statistics=False)
        taken = (carry - self.step(carry, batch, quiet, context)) / beta
        return ((squared_norm(taken - plain), squared_norm(plain)),)

    def finish(self, carry: Params, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return Payload(carry), local_state


@method(
    Family.ADAPTED,
    "one average",
    "SGD on the loss after one step; takes that step before use",
    tune={"adapt_steps": (1, 5)},
)
def perfedavg(
    *,
    alpha: Positive | None = None,
    beta: Positive | None = None,
    hessian: Literal["fo", "hf"] = "fo",
    delta: Positive = 1e-3,
    weighting: Weighting = "samples",
    adapt_on: Literal["train", "test"] = "train",
    adapt_steps: Count = 1,
) -> Algorithm:
    """A global model that becomes personal in one step; by default, alpha and beta are the learning rate.

    Source: Fallah et al. (2020), Algorithm 1 and equations 6 and 9 to 11.

    Args:
        alpha: learning rate alpha of the inner step and of the adaptation; None takes the run's learning rate.
        beta: learning rate beta of the outer step; None takes the run's learning rate.
        hessian: `fo` leaves out the Hessian; `hf` approximates the product of Hessian and gradient by differences.
        delta: step delta of the differences; without effect for `fo`.
        weighting: weights p_k in the average: by training samples, or `uniform`, as in the paper.
        adapt_on: data for the adaptation: `train`, or `test`, the part of the scores. `test` leaks test data into test
            scores; validation scores adapt on the validation part.
        adapt_steps: steps of the adaptation. FedMCSA's comparison takes two steps on test batches.
    """
    notes = ("perfedavg: adapt_on=test fits the model to test data",) if adapt_on == "test" else ()
    return Algorithm(
        PerFedAvgClient(alpha, beta, hessian, delta),
        Average(weighting),
        fine_tune=FineTune(adapt_steps, alpha, adapt_on),
        notes=notes,
    )
