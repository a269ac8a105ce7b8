"""FedProto.

    @inproceedings{tan2022fedproto,
      author = {Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing and
        Zhang, Chengqi},
      title = {{FedProto}: Federated Prototype Learning across Heterogeneous Clients},
      booktitle = {AAAI Conference on Artificial Intelligence},
      year = {2022},
      eprint = {2105.00243},
      archiveprefix = {arXiv}
    }

Algorithm 1, with the features f(x), which the classifier gets, and the prototype C_j of each class j:

    client   SGD of its model on CE + lam R, from its last model
             R = the mean over the batch of ||f(x) - C_y||^2 / (number of features), as in public code
             or = sum_j ||C_ij - C_j||, C_ij the mean of f over the batch's samples of class j, as in the paper
             C_ij <- the mean of f over all samples of class j in its local steps
    server   C_j <- sum_i n_ij C_ij / sum_i n_ij, over the clients i of the cohort with class j; n_ij its samples of j
    used as  the client's own model: the class whose C_j is nearest to f(x)

Models never travel. So that the server needs sums alone, client i uploads s_ij C_ij and s_ij with its share s_ij of
samples of class j, and the server divides the averages of both.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm, Encoding, Finished, ServerTraits, StepChanges, StepMeasuring, change
from ..core.effect import Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.options import NonNegative
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import Average, AverageState, Weighting
from .prototypes import (
    READERS,
    DistanceKind,
    ReadingCarry,
    ReadingClient,
    divide,
    encode_classes,
    make_readers,
    measure_distance,
    read_features,
)
from .table import Family, method

PredictionKind = Literal["prototypes", "head"]


class PrototypeModule(MethodModule):
    """Predicts the class of the nearest prototype, or by the head.

    It keeps the received `prototypes` (C, f) with `known` (C,): 1 if a class has one.

    By the gradients of `sums` (C, f) and `counts` (C,), client rules see features; see `read_features`.
    """

    has_batch_loss = True

    def __init__(
        self, body: nn.Module, head: nn.Linear, lam: float, distance: DistanceKind, predict: PredictionKind
    ) -> None:
        super().__init__()
        self.body, self.head, self.lam, self.distance, self.predict = body, head, lam, distance, predict
        self.prototypes, self.known = make_readers(head)  # of the same shapes
        self.sums, self.counts = make_readers(head)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return logits (B, C); in training, also the features (B, f), and the parameters beside the model."""
        features = self.body(x)
        logits: Tensor = self.head(features)
        if self.training:
            return logits, features, (self.prototypes, self.known, self.sums, self.counts)
        return self._find_nearest(features, logits) if self.predict == "prototypes" else logits

    def _find_nearest(self, f: Tensor, logits: Tensor) -> Tensor:
        """Return -||f - C_j||^2 + ||f||^2 (B, C), with f and C_j minus the mean of all C_j.

        A class without a prototype gets less than all others. Without any prototype, return `logits`.
        """
        has_one = self.known > 0
        centre = self.prototypes.mean(0)  # features far from zero would lose digits; the nearest one stays the same
        f, prototypes = f - centre, self.prototypes - centre
        near = 2 * f @ prototypes.T - prototypes.square().sum(1)
        lowest = torch.where(has_one, near, torch.inf).amin(1, keepdim=True) - 1
        return torch.where(has_one.any(), torch.where(has_one, near, lowest), logits)

    def objective(self, output: tuple[Tensor, Tensor, tuple[Tensor, ...]], batch: Batch, loss: LossFunction) -> Tensor:
        logits, f, (prototypes, known, sums, counts) = output
        one_hot = encode_classes(batch[1], known)
        pull = measure_distance(f, one_hot, prototypes.detach(), known.detach(), self.distance)
        return loss(logits, batch) + self.lam * pull + read_features(f, one_hot, sums, counts)


@dataclass(frozen=True)
class PrototypeNetwork(Network):
    """Adds the prototypes, and the parameters by which clients read features."""

    lam: float
    distance: DistanceKind
    predict: PredictionKind

    class_need = "FedProto has a prototype of each class"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return PrototypeModule(*split_head(model, x), self.lam, self.distance, self.predict)


@dataclass(frozen=True)
class PrototypeClient(ReadingClient, Encoding, StepMeasuring):
    """Client rule of FedProto: trains a personal model, and uploads s_j C_j and s_j of each class j.

    s_j is the share of samples of class j in the local steps; with `uniform`, it is 1 for all classes that occur.
    """

    weighting: Weighting = "samples"

    def init_local_state(self, w0: Params) -> LocalState:
        return {"received": w0.only(("prototypes", "known")), **super().init_local_state(w0)}

    mechanisms = (Mechanism("steps", "steps without the distance to the prototypes", "one whose models train alone"),)

    def measure_step(self, carry: ReadingCarry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        without = Params({**carry.w, "known": torch.zeros_like(carry.w["known"])})
        pulled, plain = (self.select_trained(grad(w, batch, statistics=False)) for w in (carry.w, without))
        return ((squared_norm(pulled - plain), squared_norm(plain)),)

    def finish(self, carry: ReadingCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        counts, occurs = carry.counts, carry.counts > 0
        total = counts.sum()
        shares = occurs.to(counts.dtype)
        if self.weighting == "samples":
            shares = counts / torch.where(total > 0, total, 1)
        means = divide(carry.sums, counts)
        message = {"prototypes": shares[:, None] * means, "known": shares}
        new_state = {"received": sent.params.only(("prototypes", "known")), **self.optimizer.keep(carry.optimizer)}
        return Payload(Params({**carry.w, **message})), new_state

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return Params({**upload.params, **local_state["received"]})


@dataclass(frozen=True)
class PrototypeAverage(Average[AverageState]):
    """Server rule of FedProto: C_j <- sum_k p_k s_kj C_kj / sum_k p_k s_kj; without such a class, C_j stays."""

    traits = ServerTraits(AverageState, sends_models=False)

    def aggregate(self, state: AverageState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> AverageState:
        old, averaged = state["w"], super().aggregate(state, ids, sent, uploads, n)
        sums, shares = averaged["w"]["prototypes"], averaged["w"]["known"]
        occurs = shares > 0
        prototypes = torch.where(occurs[:, None], divide(sums, shares), old["prototypes"])
        return change(averaged, w=Params(prototypes=prototypes, known=torch.where(occurs, 1.0, old["known"])))

    needed_sums = Average.needed_sums


@method(
    Family.PERSONAL_MODEL,
    "the mean features of each class",
    "SGD of its own model; draws features to the means",
    tune={"lam": (0.1, 1.0, 10.0)},
)
def fedproto(
    *,
    lam: NonNegative = 1.0,
    distance: DistanceKind = "samples",
    predict: PredictionKind = "prototypes",
    weighting: Weighting = "samples",
) -> Algorithm:
    """Personal models whose features of a class stay near the mean features of all clients.

    Source: Tan et al. (2022), Algorithm 1; the default distance is the public code's.

    Args:
        lam: weight lambda of the distance to the received prototypes; 0 trains alone.
        distance: mean square over `samples`, or the paper's sum over `classes` of the distances of the batch's means.
        predict: by the nearest of the received `prototypes`, as in the paper, or by the client's `head`.
        weighting: weights of the clients' prototypes of a class: by their `samples` of it, or `uniform`.
    """
    return Algorithm(
        PrototypeClient(weighting=weighting),
        PrototypeAverage(weighting),
        personal=NamedParameters(("body", "head", *READERS)),
        network=PrototypeNetwork(lam, distance, predict),
        notes=("fedproto: of a class with one row, a client sends the features of that row",),
    )
