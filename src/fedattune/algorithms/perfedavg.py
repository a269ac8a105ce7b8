"""Per-FedAvg. Fallah et al., NeurIPS 2020, https://arxiv.org/abs/2002.07948, Algorithm 1.

client   v = w - alpha g(w; B);  w <- w - beta g(v; B')   (fo; hf adds the Hessian part by differences)
server   as FedAvg
used as  w adapted by one step (or `adapt_steps`) of rate alpha on the client's own data
"""

from typing import Literal

from ..client import Meta
from ..core import Algorithm, FineTune
from ..registry import Count, Positive
from ..server import Average
from ..server.average import Weighting


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
    """A global model that becomes personal by one step; alpha and beta are the learning rate unless given.

    `adapt_on="test"` with two `adapt_steps` adapts on test batches as FedMCSA's comparison did: it leaks. Validation
    accuracies then are those after adaptation on validation batches, so that no test data decide on other options.
    """
    notes = ("perfedavg: adapt_on=test fits the model to test data",) if adapt_on == "test" else ()
    return Algorithm(
        Meta(alpha, beta, hessian, delta),
        Average(weighting),
        adapt=FineTune(adapt_steps, alpha, adapt_on),
        notes=notes,
    )
