"""MOON.

    @inproceedings{li2021model,
      author = {Li, Qinbin and He, Bingsheng and Song, Dawn},
      title = {Model-Contrastive Federated Learning},
      booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
      year = {2021},
      eprint = {2103.16257},
      archiveprefix = {arXiv}
    }

Algorithm 1, with the features R_w(x), which the classifier of the model w gets:

    client   theta <- w, then SGD on CE + mu l_con;  z = R_theta(x), z_glob = R_w(x), z_prev = R_prev(x)
             l_con = -log( exp(sim(z, z_glob)/tau) / (exp(sim(z, z_glob)/tau) + exp(sim(z, z_prev)/tau)) )
             prev <- theta, the client's model after its last training;  sim is the cosine
    server   as FedAvg
"""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.modules.dropout import _DropoutNd

from ..client import Optimizing, PartCarry
from ..core.algorithm import Algorithm, Finished, StepChanges, StepMeasuring
from ..core.effect import Mechanism
from ..core.losses import LossFunction, compute_loss
from ..core.network import MethodModule, Network, split_head
from ..core.options import NonNegative, Positive
from ..core.params import Params, add_prefix, select_prefix, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import PartAverage, Weighting
from .table import Family, method

GLOBAL, PREVIOUS = "global_body", "previous_body"
"""The frozen copies of the body: of the received model, and of the client's last trained model."""


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return the two similarities (B, 2) of features (B, f), divided by tau: logits, of which the first is right."""
    pairs = [cosine_similarity(z.flatten(1), other.flatten(1)) for other in (z_glob, z_prev)]
    return torch.stack(pairs, 1) / tau


class MoonModule(MethodModule):
    """Predicts head(body(x)); in training, it also returns the logits of the model-contrastive loss."""

    def __init__(self, body: nn.Module, head: nn.Linear, mu: float, tau: float) -> None:
        super().__init__()
        self.body, self.head, self.mu, self.tau = body, head, mu, tau
        self.global_body, self.previous_body = copy.deepcopy(body), copy.deepcopy(body)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the frozen copies never drop out features.

        Their BatchNorm layers keep the mode: clients have running statistics of their body alone.
        """
        super().train(mode)
        for module in (*self.global_body.modules(), *self.previous_body.modules()):
            if isinstance(module, _DropoutNd):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, C); in training also the logits (B, 2) of the model-contrastive loss."""
        z = self.body(x.clone() if self.training else x)  # a body may write over its inputs
        logits: Tensor = self.head(z)
        if not self.training:
            return logits
        with torch.no_grad():
            z_glob, z_prev = self.global_body(x.clone()), self.previous_body(x)
        return logits, contrast(z, z_glob, z_prev, self.tau)

    def objective(self, output: tuple[Tensor, Tensor], batch: Batch, loss: LossFunction) -> Tensor:
        logits, similarities = output
        x, _, *weight = batch
        first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return loss(logits, batch) + self.mu * compute_loss(similarities, (x, first, *weight))


@dataclass(frozen=True)
class MoonNetwork(Network):
    """Adds two frozen copies of the body."""

    mu: float
    tau: float

    generic = True  # predictions do not read the frozen copies

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return MoonModule(*split_head(model, x), self.mu, self.tau)


def _with_copies(w: Params, *names: str) -> Params:
    """Return the model with its body in the copies called `names`."""
    body = select_prefix(w, "body.")
    return Params({**w, **{k: v for name in names for k, v in add_prefix(f"{name}.", body).items()}})


@dataclass(frozen=True)
class MoonClient(Optimizing, StepMeasuring):
    """Client rule of MOON: SGD of body and head, with the received and the last trained body beside them."""

    trained_parts = ("body.", "head.")

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> PartCarry:
        w = _with_copies(sent.params, GLOBAL)
        return PartCarry(w, self.optimizer.begin(self.select_trained(w), local_state))

    mechanisms = (Mechanism("steps", "steps without the model-contrastive loss", "FedAvg"),)

    def measure_step(self, carry: PartCarry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        # With equal copies, both similarities are equal at every z, and l_con = log 2 has no gradient.
        received = add_prefix(f"{PREVIOUS}.", select_prefix(carry.w, f"{GLOBAL}."))
        with_loss, plain = (
            self.select_trained(grad(w, batch, statistics=False)) for w in (carry.w, Params({**carry.w, **received}))
        )
        return ((squared_norm(with_loss - plain), squared_norm(plain)),)

    def finish(self, carry: PartCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        # The next round replaces the global copy; until then, the client keeps its trained body alone.
        return Payload(_with_copies(carry.w, GLOBAL, PREVIOUS)), self.optimizer.keep(carry.optimizer)


@method(
    Family.GLOBAL,
    "one average",
    "SGD; draws features to those of the average, away from those of its last model",
    tune={"mu": (0.1, 1.0, 5.0)},
)
def moon(*, mu: NonNegative = 5.0, tau: Positive = 0.5, weighting: Weighting = "samples") -> Algorithm:
    """FedAvg whose clients keep the features of their samples near those of the global model.

    Source: Li, He and Song (2021), Algorithm 1 and equations 3 and 4.

    Args:
        mu: weight mu of the model-contrastive loss; the paper tries 0.1, 1, 5 and 10, with 5 the best on CIFAR-10.
            0 is FedAvg.
        tau: temperature tau of the similarities; the paper takes 0.5.
        weighting: weights p_k in the average: by training samples, or `uniform`.
    """
    return Algorithm(
        MoonClient(),
        PartAverage(weighting, copies=((GLOBAL, "body"), (PREVIOUS, "body"))),
        personal=NamedParameters((GLOBAL, PREVIOUS)),
        network=MoonNetwork(mu, tau),
        evaluation_point="received",
    )
