"""MOCHA, by gradient steps.

    @inproceedings{smith2017federated,
      author = {Smith, Virginia and Chiang, Chao-Kai and Sanjabi, Maziar and Talwalkar, Ameet},
      title = {Federated Multi-Task Learning},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2017},
      eprint = {1705.10467},
      archiveprefix = {arXiv}
    }

Rules:

    minimises  sum_t f_t(w_t) + lam1 tr(W Omega W^T) + lam2 ||W||_F^2,  W = [w_1 .. w_m]                    (1)
    client     w_t <- w_t - lr (g(w_t) + 2 lam1 (W Omega)_t + 2 lam2 w_t), the other models as last uploaded
    server     mean     Omega = I - 11^T/m, so that (W Omega)_t = w_t - mean
               learned  Omega = Sigma^(-1),  Sigma = (W^T W)^(1/2) / tr((W^T W)^(1/2))
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NotRequired

import torch
from torch import Tensor

from ..client import SGD, Correction, LocalContext, StartPoint
from ..core.algorithm import Algorithm, ServerTraits, Substituting
from ..core.dense import column_blocks
from ..core.effect import Mechanism
from ..core.options import NonNegative
from ..core.params import Params
from ..core.payload import Broadcast, Payload
from ..server.mixing import StoreState, UploadStore
from ..server.products import flatten, mix
from .table import Family, method


@dataclass(frozen=True)
class RelationshipCorrection(Correction):
    """Gradient of lam1 tr(W Omega W^T) + lam2 ||W||^2 at the own model w_t (equation 1).

    The server rule `TaskRelationship` sends sum_{s != t} Omega_st w_s and Omega_tt. Personal tensors are not related.
    """

    lam1: float
    lam2: float

    required_extras: ClassVar[dict[str, str]] = {"omega": "TaskRelationship"}
    mechanism = Mechanism("steps", "steps without the tie to other models", "training alone")

    def __call__(self, g: Params, w: Params, local: LocalContext) -> Params:
        sent, own = local.sent, local.sent.extra["omega"]["own"]
        personal = set(local.context.personal_names)
        gradient = {}
        for k, v in w.items():
            relation = 0.0 if k in personal else self.lam1 * (sent.params[k] + own * v)
            gradient[k] = g[k] + 2 * relation + 2 * self.lam2 * v
        return Params(gradient)


@dataclass(frozen=True)
class MochaClient(SGD, Substituting):
    """Client rule of MOCHA: SGD with the tie, on a model of its own.

    The payload is no model. Without data, the tie would pull w to -sent / Omega_tt.
    """

    start: StartPoint = "own"

    def offered_model(self, sent: Payload) -> Params:
        """Return the model to which the tie pulls."""
        own = sent.extra["omega"]["own"]
        return sent.params.map(lambda v: -v / own.to(v))

    def substitute(self, sent: Payload, own: Params) -> Payload:
        """Let the tie pull to the own last model."""
        return sent._replace(params=own.map(lambda v: -v * sent.extra["omega"]["own"].to(v)))


SMOOTHING = 1e-4
"""Share of the mean eigenvalue of W^T W that is added to all: Sigma must be invertible, as for equal models at the
start. The eigenvalues of Omega are then at most about 100 m, for m clients; 100 sqrt(m) + m for equal models."""

DEFAULT_LAM1 = {"mean": 0.5, "learned": 1e-3}
"""Default weight of the tie: the entries of the learned Omega are larger by hundreds."""


class TaskState(StoreState):
    """A store; after training also the number of clients that trained, as only newcomers are served then."""

    n_trained: NotRequired[Tensor]


@dataclass(frozen=True)
class TaskRelationship(UploadStore[TaskState]):
    """Server rule of MOCHA: sends sum_{s != t} Omega_st w_s and Omega_tt to client t, from the last uploads w_s.

    `omega` is `mean` (I - 11^T/m), or `learned`, for every broadcast: the inverse of a covariance of trace 1.
    A newcomer t after training has an Omega of its own, of the trained clients and t.
    """

    omega: Literal["mean", "learned"] = "mean"

    traits = ServerTraits(TaskState, sends_models=False)  # a payload is a sum of others' models

    def broadcast(self, state: TaskState, ids: Tensor) -> Broadcast:
        W = state["theta"]
        rows = self._relate_newcomers(state, ids) if "n_trained" in state else self.matrix(state)[ids]
        own = rows.gather(1, ids[:, None])
        others = rows.scatter(1, ids[:, None], 0.0)
        relation = Params({name: mix(others, W.only([name]).rows(slice(None))[name]) for name in W})
        like = next(iter(relation.values()), own)
        return Broadcast(Payload(relation, {"omega": Params(own=own[:, 0].to(like.dtype))}))

    def discard_uploads(self, state: TaskState, ids: Tensor) -> TaskState:
        return self.forget(state, ids)

    def matrix(self, state: TaskState) -> Tensor:
        """Return Omega (N, N)."""
        return self._make_omega(self._products(state))

    def _relate_newcomers(self, state: TaskState, ids: Tensor) -> Tensor:
        """Return the rows (R, N) of newcomers `ids`, each of the Omega of the trained clients and the newcomer."""
        products = self._products(state)
        trained = torch.arange(int(state["n_trained"]), device=ids.device)
        rows = products.new_zeros(len(ids), len(products))
        for row, t in zip(rows, ids, strict=True):
            members = torch.cat([trained, t[None]])
            row[members] = self._make_omega(products[members][:, members])[-1]
        return rows

    def _products(self, state: TaskState) -> Tensor:
        """Return W^T W (N, N), float64; zeros for `mean`, which is the same for all models."""
        seen, W = state["has_uploaded"], state["theta"]
        gram = torch.zeros(len(seen), len(seen), dtype=torch.float64, device=seen.device)
        for name in W if self.omega == "learned" else ():
            models = flatten(W.only([name]).rows(slice(None))[name])
            for c in column_blocks(2 * len(seen), models.shape[1], models.device):
                part = models[:, c].double()
                gram.addmm_(part, part.T)
        return gram

    def _make_omega(self, gram: Tensor) -> Tensor:
        """Return Omega (m, m) of m clients, from W^T W."""
        if self.omega == "mean":
            return torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - 1 / len(gram)
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0) + SMOOTHING * values.mean().clamp_min(1e-12)
        norms = values.sqrt()  # the eigenvalues of (W^T W)^(1/2)
        omega: Tensor = (vectors * (norms.sum() / norms)) @ vectors.T
        return omega


@method(
    Family.PERSONAL_MODEL,
    "a weighted sum of the other clients' models",
    "trains a personal model tied to the sum",
    tune={"lam1": (None, 0.05, 0.01)},
)
def mocha(
    *, lam1: NonNegative | None = None, lam2: NonNegative = 0.0, omega: Literal["mean", "learned"] = "mean"
) -> Algorithm:
    """Every client has its own model; a regulariser ties the models by a given or learned matrix.

    Source: Smith et al. (2017), equation 1, with gradient steps in place of the dual solver.

    Args:
        lam1: weight lambda_1 of tr(W Omega W^T), the tie; None is 0.5 for `mean` and 0.001 for `learned`, whose Omega
            has much larger entries.
        lam2: weight lambda_2 of ||W||_F^2, a weight decay of 2 lam2.
        omega: matrix Omega: `mean` is I - 11^T / m, which pulls to the mean; `learned` is the inverse of
            (W^T W)^(1/2) / trace, from the last uploads in every round.
    """
    tie = DEFAULT_LAM1[omega] if lam1 is None else lam1
    return Algorithm(MochaClient((RelationshipCorrection(tie, lam2),)), TaskRelationship(omega))
