"""The network of FedAM and FedCP: features are shared out between a personal and a global head, sample by sample.

The module has the parts `global_body`, `global_head` (frozen while training), `body`, `head` (personal),
`attention`, and the client's vector `context`; `client.Separated` says which of them move and travel.
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..core import Batch
from ..network import MethodModule, Network, split
from ..task import cross_entropy
from .alignment import coral, mmd

Vector = Literal["sum", "absolute", "difference"]
Context = Literal["product", "concatenated"]
Combination = Literal["logits", "probabilities"]


def client_vector(kind: Vector, own: Tensor, shared: Tensor) -> Tensor:
    """The client's vector v (f,) of length 1, from the weights (C, f) of its own head and of the global one.

    `sum`: the sum over classes; `absolute`: that of absolute values; `difference`: that of |own - global|.
    """
    weights = {"sum": own, "absolute": own.abs(), "difference": (own - shared).abs()}[kind]
    v = weights.sum(0)
    unit: Tensor = v / v.norm().clamp_min(1e-12)
    return unit


class Shares(nn.Module):
    """Two complementary weights per feature from a context u (B, k): linear, ReLU, linear, softmax of each pair."""

    def __init__(self, inputs: int, hidden: int, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, 2 * features)

    def forward(self, u: Tensor) -> Tensor:
        """Weights (B, 2, features) that sum to 1 over the pair."""
        pairs: Tensor = self.last(torch.relu(self.first(u))).unflatten(1, (2, -1))
        return pairs.softmax(1)


class Policy(nn.Module):
    """FedCP's conditional policy: linear, layer normalisation, ReLU, Gumbel softmax of each pair at temperature 1."""

    def __init__(self, features: int, noise: bool) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Linear(features, 2 * features), nn.LayerNorm(2 * features), nn.ReLU())
        self.noise = noise

    def forward(self, u: Tensor) -> Tensor:
        """Weights (B, 2, f) that sum to 1 over the pair."""
        pairs: Tensor = self.scores(u).unflatten(1, (2, -1))
        if self.noise and self.training:
            pairs = pairs - torch.rand_like(pairs).clamp_min(1e-30).log().neg().clamp_min(1e-30).log()
        return pairs.softmax(1)


class SeparatedModel(MethodModule):
    """y = head(r * f_p) + global_head(s * f_p) with f_p = body(x) and [r; s] = attention(f_p, context)."""

    batch_statistics = True

    def __init__(
        self, body: nn.Module, head: nn.Linear, attention: nn.Module, v: Tensor, network: "Separation"
    ) -> None:
        super().__init__()
        self.global_body, self.global_head = copy.deepcopy(body), copy.deepcopy(head)
        self.body, self.head, self.attention = body, head, attention
        self.context = nn.Parameter(v)
        self.network = network

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Logits (B, C); in training mode also the personal and the global features (B, f)."""
        own = self.body(x)
        v = self.context.detach().expand_as(own)
        u = torch.cat([own, v], 1) if self.network.context == "concatenated" else own * v
        r, s = self.attention(u).unbind(1)
        bias = self.global_head.bias
        shared_logits = nn.functional.linear(
            s * own, self.global_head.weight.detach(), None if bias is None else bias.detach()
        )
        logits = combined(self.head(r * own), shared_logits, self.network.combine)
        if not self.training:
            return logits
        with torch.no_grad():
            shared = self.global_body(x)
        return logits, own, shared

    def objective(self, output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        """Cross-entropy plus lam times the alignment of personal and global features."""
        logits, own, shared = output
        loss = cross_entropy(logits, batch)
        lam = self.network.lam
        return loss + lam * self.network.alignment(own, shared) if lam else loss


def combined(own: Tensor, shared: Tensor, how: Combination) -> Tensor:
    """The heads' logits (B, C) added, or the logarithm of the mean of their probabilities."""
    if how == "logits":
        return own + shared
    return torch.logaddexp(own.log_softmax(1), shared.log_softmax(1)) - torch.log(own.new_tensor(2.0))


@dataclass(frozen=True)
class Separation(Network):
    """Five parts made of the user's model and a module of attention, which a subclass makes.

    `vector` says what the client's vector is at the start; with `random_first`, it is drawn (the same for all).
    """

    lam: float = 1.0
    context: Context = "product"
    combine: Combination = "logits"
    vector: Vector = "sum"
    random_first: bool = False

    @abstractmethod
    def attention(self, features: int) -> nn.Module:
        """Makes weights (B, 2, f) or (B, 2, 1) of a context (B, f), or (B, 2 f) if it is concatenated."""

    @abstractmethod
    def alignment(self, own: Tensor, shared: Tensor) -> Tensor:
        """How unlike personal and global features (B, f) are."""

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        """Both bodies and both heads start as the model's."""
        body, head = split(model, x)
        weight = head.weight.detach()
        v = torch.rand_like(weight[0]) if self.random_first else client_vector(self.vector, weight, weight)
        attention = self.attention(head.in_features).to(weight)
        return SeparatedModel(body, head, attention, v / v.norm().clamp_min(1e-12), self)


@dataclass(frozen=True)
class FedAMNetwork(Separation):
    """Attention of two linear layers, `hidden` wide (None: 0.19 f), per feature or one pair per sample; CORAL."""

    hidden: int | None = None
    per_feature: bool = True

    def attention(self, features: int) -> nn.Module:
        """Two linear layers."""
        inputs = features * (2 if self.context == "concatenated" else 1)
        hidden = max(1, round(0.19 * features)) if self.hidden is None else self.hidden
        return Shares(inputs, hidden, features if self.per_feature else 1)

    def alignment(self, own: Tensor, shared: Tensor) -> Tensor:
        """Correlation alignment."""
        return coral(own, shared)


@dataclass(frozen=True)
class FedCPNetwork(Separation):
    """FedCP's conditional policy, with Gumbel noise while training; maximum mean discrepancy."""

    noise: bool = True

    def attention(self, features: int) -> nn.Module:
        """One linear layer with layer normalisation."""
        return Policy(features, self.noise)

    def alignment(self, own: Tensor, shared: Tensor) -> Tensor:
        """Maximum mean discrepancy."""
        return mmd(own, shared)
