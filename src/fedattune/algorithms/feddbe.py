"""FedDBE.

    @inproceedings{zhang2023eliminating,
      author = {Zhang, Jianqing and Hua, Yang and Cao, Jian and Wang, Hao and Song, Tao and Xue, Zhengui and
        Ma, Ruhui and Guan, Haibing},
      title = {Eliminating Domain Bias for Federated Learning in Representation Space},
      booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
      year = {2023},
      eprint = {2311.14975},
      archiveprefix = {arXiv}
    }

FedAvg with the domain bias eliminator, for features f(x), which the head g gets, a client's personal bias m_i, and the
consensus z, the mean of the clients' mean features in the first round:

    client   round 1: SGD on CE(g(f(x)), y);  z_i <- (1 - mu) z_i + mu (mean of f over the batch), from 0
             later: SGD of f, g and m_i on CE(g(f(x) + m_i), y) + kappa / 2 ||z_i - z||^2 / (number of features),
             with z_i as in round 1, from 0 in every round; its gradient reaches f by the last batch alone
    server   f, g <- sum_k p_k (f_k, g_k);  after round 1 only: z <- sum_k p_k z_k
    used as  g(f(x) + m_i);  m_i is 0 at the start and stays on its client
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ..client import Optimizing, PartCarry
from ..core.algorithm import Algorithm, Finished, StepChanges, StepMeasuring, change
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.options import NonNegative
from ..core.params import Params, squared_norm
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext
from ..core.selectors import NamedParameters
from ..server.average import AverageState, PartAverage, Weighting
from .prototypes import read_features
from .table import Family, method

BIAS = Mechanism("predictions", "predictions without the personal bias", "one without personal biases")
CONSENSUS = Mechanism("steps", "steps without the distance to the consensus", "one without this distance")


class BiasModule(MethodModule):
    """Predicts head(body(x) + bias); in training, it also draws the mean features to the consensus.

    It keeps the received `consensus` (f,) with `known` (1,): 1 if there is one, and the client's running `mean` (f,).
    The gradients of `sums` and `counts` tell client rules the features of the batch; see `read_features`.
    """

    has_batch_loss = True

    def __init__(self, body: nn.Module, head: nn.Linear, kappa: float, mu: float) -> None:
        super().__init__()
        self.body, self.head, self.kappa, self.mu = body, head, kappa, mu
        zeros = head.weight.detach().new_zeros(head.in_features)
        self.bias, self.mean, self.consensus = (nn.Parameter(zeros.clone()) for _ in range(3))
        self.known, self.sums, self.counts = (nn.Parameter(z.clone()) for z in (zeros[:1], zeros[None], zeros[:1]))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return outputs (B, C); in training, also the features (B, f), and the parameters beside the model."""
        features = self.body(x)
        output: Tensor = self.head(features + self.bias)
        if not self.training:
            return output
        return output, features, (self.mean, self.consensus, self.known, self.sums, self.counts)

    def objective(self, output: tuple[Tensor, Tensor, tuple[Tensor, ...]], batch: Batch, loss: LossFunction) -> Tensor:
        outputs, f, (mean, consensus, known, sums, counts) = output
        running = (1 - self.mu) * mean.detach() + self.mu * f.mean(0)
        distance = known.detach()[0] * (running - consensus.detach()).square().mean() / 2
        return loss(outputs, batch) + self.kappa * distance + read_features(f, torch.ones_like(f[:, :1]), sums, counts)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        without = self.head(self.body(x))
        return (Effect(BIAS, float((self(x) - without).norm() / without.norm().clamp_min(1e-30))),)


@dataclass(frozen=True)
class BiasNetwork(Network):
    """Adds a personal bias to the features, and the parameters by which clients read and compare them."""

    kappa: float
    mu: float

    generic = True  # without its bias, the module is the global model

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        return BiasModule(*split_head(model, x), self.kappa, self.mu)


@dataclass(frozen=True)
class BiasClient(Optimizing, StepMeasuring):
    """Client rule of FedDBE: SGD of body, head and bias. It uploads its mean features if there is no consensus yet."""

    mu: float = 1.0

    trained_parts = ("bias", "body.", "head.")

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> PartCarry:
        w = Params({**sent.params, "mean": torch.zeros_like(sent.params["mean"])})
        return PartCarry(w, self.optimizer.begin(self.select_trained(w), local_state))

    def step(self, carry: PartCarry, batch: Batch, grad: Grad, context: RoundContext) -> PartCarry:
        w, g = carry.w, grad(carry.w, batch)
        mean = (1 - self.mu) * w["mean"] + self.mu * g["sums"][0] / g["counts"]
        g["bias"] = g["bias"] * w["known"]  # the first round is FedAvg's
        moved, g = self.select_trained(w), self.select_trained(g)
        trained, optimizer = self.optimizer.step(moved, g, carry.optimizer, context.lr)
        return PartCarry(Params({**w, **trained, "mean": mean}), optimizer)

    mechanisms = (CONSENSUS,)

    def measure_step(self, carry: PartCarry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        without = Params({**carry.w, "known": torch.zeros_like(carry.w["known"])})
        drawn, plain = (self.select_trained(grad(w, batch, statistics=False)) for w in (carry.w, without))
        return ((squared_norm(drawn - plain), squared_norm(plain)),)

    def finish(self, carry: PartCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        w = carry.w
        # Once there is a consensus, the client sends it back; its mean features are neither sent nor kept.
        consensus = torch.where(w["known"] > 0, w["consensus"], w["mean"])
        message = {"consensus": consensus, "known": torch.ones_like(w["known"]), "mean": torch.zeros_like(w["mean"])}
        return Payload(Params({**w, **message})), self.optimizer.keep(carry.optimizer)


@dataclass(frozen=True)
class ConsensusAverage(PartAverage):
    """Server rule of FedDBE: FedAvg whose first average of mean features stays the consensus."""

    def aggregate(self, state: AverageState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> AverageState:
        old, averaged = state["w"], super().aggregate(state, ids, sent, uploads, n)
        w = averaged["w"]
        consensus = torch.where(old["known"][0] > 0, old["consensus"], w["consensus"])
        return change(averaged, w=Params({**w, "consensus": consensus, "known": torch.ones_like(w["known"])}))

    needed_sums = PartAverage.needed_sums


@method(
    Family.ADAPTED,
    "one average, and the mean features of the first round",
    "SGD; adds a personal bias to features, whose mean stays near the received one",
    tune={"kappa": (0.0, 1.0, 10.0, 50.0)},
)
def feddbe(
    *, kappa: NonNegative = 1.0, mu: Annotated[float, Field(gt=0, le=1)] = 1.0, weighting: Weighting = "samples"
) -> Algorithm:
    """FedAvg whose clients keep a personal bias of the features, so that shared features need not differ.

    Source: Zhang et al. (2023).

    Args:
        kappa: weight kappa of the distance of mean features from the consensus; 0 has the personal bias alone.
        mu: momentum mu of a client's mean features: the share of the last batch, above 0 and at most 1.
        weighting: weights p_k in the averages: by training samples, or `uniform`.
    """
    return Algorithm(
        BiasClient(mu=mu),
        ConsensusAverage(weighting),
        personal=NamedParameters(("bias", "mean", "sums", "counts")),
        network=BiasNetwork(kappa, mu),
        evaluation_point="received",
        notes=("feddbe: in the first round, a client sends the mean features of its last batches",),
    )
