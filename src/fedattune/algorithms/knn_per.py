"""kNN-Per.

    @inproceedings{marfoq2022personalized,
      author = {Marfoq, Othmane and Neglia, Giovanni and Kameni, Laetitia and Vidal, Richard},
      title = {Personalized Federated Learning through Local Memorization},
      booktitle = {International Conference on Machine Learning (ICML)},
      year = {2022},
      eprint = {2111.09360},
      archiveprefix = {arXiv}
    }

Rules, with the global model h and its features phi, the input of its last layer:

    client   theta <- w, then SGD
    server   as FedAvg
    used as  lam h_i(x) + (1 - lam) h(x), with the k training rows (x_j, y_j) of the client whose features are nearest:
             h_i(x)_y = sum over j with y_j = y of exp(-||phi(x) - phi(x_j)||) / sum over all j of the same
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..client import Optimizing
from ..core.algorithm import Algorithm, Finished, LocalPlan, Probe, Probing
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.options import Count, Fraction
from ..core.params import Params
from ..core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server import Average
from ..server.average import Weighting
from .prototypes import encode_classes
from .table import Family, method

ROWS, LABELS = "memory.rows", "memory.labels"
"""Names of the memory among the parameters: inputs (M, ...), and labels (M, C), one-hot or zero for an empty place."""

MEMORY = Mechanism("predictions", "predictions of the global model", "FedAvg")


class MemoryModule(MethodModule):
    """Predicts lam h_i(x) + (1 - lam) h(x); without rows in the memory, h(x). It trains h alone."""

    def __init__(self, body: nn.Module, head: nn.Linear, x: Tensor, network: "MemoryNetwork") -> None:
        super().__init__()
        self.body, self.head, self.network = body, head, network
        like, m = head.weight, network.memory
        rows, labels = like.new_zeros(m, *x.shape[1:]), like.new_zeros(m, head.out_features)
        self.memory = nn.ParameterDict({"rows": rows, "labels": labels})

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C); in evaluation log-probabilities."""
        features = self.body(x)
        logits: Tensor = self.head(features)
        if self.training:
            return logits
        labels = self.memory["labels"]
        lam = self.network.lam * labels.sum().clamp_max(1)  # 0 without rows
        neighbours = self._find_neighbours(features, x.dtype) @ labels
        mixture: Tensor = lam * neighbours + (1 - lam) * logits.softmax(1)
        return mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()

    def _find_neighbours(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights (B, M) of the rows of the memory: 0 but for the k nearest ones."""
        others = self.body(self.memory["rows"].to(dtype))
        centre = others.mean(0)  # features far from zero would lose digits; distances stay the same
        features, others = features - centre, others - centre
        # ||a - b||^2 = ||a||^2 + ||b||^2 - 2 <a, b> needs no (B, M, features); ONNX has no torch.cdist.
        squares = features.square().sum(1)[:, None] + others.square().sum(1) - 2 * features @ others.T
        distances = squares.clamp_min(0).sqrt()
        scores = torch.where(self.memory["labels"].sum(1) > 0, -distances, -1e9)  # empty places come last
        nearest, index = scores.topk(min(self.network.k, len(others)), dim=1)
        return torch.zeros_like(scores).scatter(1, index, nearest.softmax(1))

    def objective(self, output: Tensor, batch: Batch, loss: LossFunction) -> Tensor:
        """Return the loss of the global model."""
        return loss(output, batch)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the change of the predicted probabilities by the memory."""
        alone = self.head(self.body(x)).softmax(1)
        return (Effect(MEMORY, float((self(x).exp() - alone).norm() / alone.norm())),)


@dataclass(frozen=True)
class MemoryNetwork(Network):
    """Puts a memory of the client's training rows beside the model. Options: see `knn_per`."""

    k: int = 10
    lam: float = 0.5
    memory: int = 100

    generic = True  # without rows in the memory, the module is the global model
    class_need = "kNN-Per's neighbours vote for classes"

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return MemoryModule(*split_head(model, x), x, self)


class _Carry(NamedTuple):
    w: Params
    memory: Params
    n: Tensor
    optimizer: LocalState


@dataclass(frozen=True)
class MemoryClient(Optimizing, Probing):
    """Client rule of kNN-Per: local SGD on the global model; the memory takes the first training rows that it reads."""

    plan = LocalPlan(probe=Probe(makes_received_model=True))

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        w, empty = sent.params, sent.params.only((ROWS, LABELS)).zeros()
        return _Carry(w, empty, torch.zeros_like(context.n_steps), self.optimizer.begin(w, local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        """Put the rows of the batch at the next places of the memory; those that find no place are left out."""
        x, y, *weight = batch
        rows, labels = carry.memory.values()
        is_row = weight[0] if weight else torch.ones_like(y, dtype=labels.dtype)
        place = carry.n + is_row.cumsum(0) - 1
        chosen = (place == torch.arange(len(labels), device=place.device)[:, None]).to(labels.dtype) * is_row
        labels = labels + torch.tensordot(chosen, encode_classes(y, labels[0]), 1)
        rows = rows + torch.tensordot(chosen, x.to(rows.dtype), 1)
        return carry._replace(memory=Params({ROWS: rows, LABELS: labels}), n=carry.n + is_row.sum())

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        return Payload(Params({**carry.w, **carry.memory})), self.optimizer.keep(carry.optimizer)


@method(
    Family.ADAPTED,
    "one average",
    "SGD; mixes the average's predictions with those of its nearest training rows",
    tune={"lam": (0.1, 0.3, 0.5, 0.7, 0.9)},
)
def knn_per(*, k: Count = 10, lam: Fraction = 0.5, memory: Count = 100, weighting: Weighting = "samples") -> Algorithm:
    """FedAvg whose clients mix its predictions with a vote of their nearest training rows.

    Source: Marfoq et al. (2022).

    Args:
        k: number of nearest rows that vote.
        lam: weight lambda of the vote; 0 is FedAvg. The paper tunes it for each client on validation rows.
        memory: maximum number of training rows that a client keeps for the vote.
        weighting: weights p_k in the average: by training samples, or `uniform`.
    """
    return Algorithm(
        MemoryClient(),
        Average(weighting),
        personal=NamedParameters(("memory",)),
        network=MemoryNetwork(k, lam, memory),
        evaluation_point="received",
        notes=(f"knn_per: a client's saved or exported model holds up to {memory} of its training rows",),
    )
