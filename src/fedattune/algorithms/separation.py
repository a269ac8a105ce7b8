"""Divide features between a personal and a global head, sample by sample: shared by FedAM and FedCP.

The network has the parts `global_body`, `global_head` (frozen in training), `body`, `head` (personal), `attention`, and
the client's vector `context`. `SeparationClient` trains the parts and decides which of them travel.
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..client import Optimizing, PartCarry
from ..core.algorithm import Finished
from ..core.effect import Effect, Mechanism
from ..core.losses import LossFunction
from ..core.network import MethodModule, Network, split_head
from ..core.params import Params
from ..core.payload import Batch, LocalState, Payload, RoundContext
from ..core.selectors import NamedParameters

MMD_BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Bandwidths of FedCP's kernels."""

SMALLEST_SQUARE = 1e-24
"""Keeps quotients of features that do not vary at 0."""


def coral(a: Tensor, b: Tensor) -> Tensor:
    """Return ||C_a - C_b||_F^2 / (4 f^2) for features a, b (B, f) with covariances C of divisor B - 1.

    Source: Deep CORAL (Sun and Saenko, 2016), equation 1. It is 0 for one sample.
    """
    return (_covariance(a) - _covariance(b)).square().sum() / (4 * a.shape[1] ** 2)


def relative_coral(a: Tensor, b: Tensor) -> Tensor:
    """Return ||C_a - C_b||_F^2 / (||C_a||_F^2 + ||C_b||_F^2) for features a, b (B, f) with covariances C: 0 to 2.

    Common factors of both features cancel. It is 0 for one sample.
    """
    C_a, C_b = _covariance(a), _covariance(b)
    return (C_a - C_b).square().sum() / (C_a.square().sum() + C_b.square().sum()).clamp_min(SMALLEST_SQUARE)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of k(a, a') + k(b, b') - 2 k(a, b') over all pairs of features a, b (B, f).

    k(x, y) = sum_s exp(-||x - y||^2 / (2 s)) over the bandwidths s of FedCP's public code.
    """
    return (_kernel(a, a) + _kernel(b, b) - 2 * _kernel(a, b)).mean()


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    return centred.T @ centred / max(1, len(features) - 1)


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return torch.stack([torch.exp(-squares / (2 * s)) for s in MMD_BANDWIDTHS]).sum(0)


VectorKind = Literal["sum", "absolute", "difference"]
ContextKind = Literal["product", "concatenated", "client"]
AlignmentKind = Literal["relative", "coral"]
CombinationKind = Literal["logits", "probabilities"]


def make_client_vector(kind: VectorKind, own: Tensor, shared: Tensor) -> Tensor:
    """Return the client's vector (f,) of norm 1, from the weights (C, f) of the personal and the global head.

    It is the sum over classes of the own weights (`sum`), of their absolute values (`absolute`), or of |own - shared|
    (`difference`).
    """
    weights = {"sum": own, "absolute": own.abs(), "difference": (own - shared).abs()}[kind]
    v = weights.sum(0)
    unit: Tensor = v / v.norm().clamp_min(1e-12)
    return unit


class FeatureAttention(nn.Module):
    """Two complementary weights per feature from a context u (B, k): linear, ReLU, linear, softmax of each pair."""

    def __init__(self, inputs: int, hidden: int, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, 2 * features)

    def forward(self, u: Tensor) -> Tensor:
        """Return weights (B, 2, features) that sum to 1 over the pair."""
        pairs: Tensor = self.last(torch.relu(self.first(u))).unflatten(1, (2, -1))
        return pairs.softmax(1)


class ConditionalPolicy(nn.Module):
    """FedCP's policy: linear, layer normalisation, ReLU, Gumbel softmax of each pair at temperature 1."""

    def __init__(self, features: int, noise: bool) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Linear(features, 2 * features), nn.LayerNorm(2 * features), nn.ReLU())
        self.noise = noise

    def forward(self, u: Tensor) -> Tensor:
        """Return weights (B, 2, f) that sum to 1 over the pair."""
        pairs: Tensor = self.scores(u).unflatten(1, (2, -1))
        if self.noise and self.training:
            pairs = pairs - torch.rand_like(pairs).clamp_min(1e-30).log().neg().clamp_min(1e-30).log()
        return pairs.softmax(1)


DIVISION = Mechanism(
    "predictions", "predictions with one division for all samples", "one without sample-specific attention"
)


class SeparationModule(MethodModule):
    """y = head(r * f_p) + global_head(s * f_p) with f_p = body(x) and [r; s] = attention(f_p, context).

    Both bodies, and both heads, start as the user's; `v` (f,) is the client's first vector.
    """

    has_batch_loss = True

    def __init__(
        self, body: nn.Module, head: nn.Linear, attention: nn.Module, v: Tensor, network: "SeparationNetwork"
    ) -> None:
        super().__init__()
        self.global_body, self.global_head = copy.deepcopy(body), copy.deepcopy(head)
        self.body, self.head, self.attention = body, head, attention
        self.context = nn.Parameter(v)
        self.network = network

    def gates(self, x: Tensor) -> Tensor:
        """Return the personal head's shares r of the features: (B, f), or (B, 1) for one share per sample."""
        return self._divide(self.body(x))[0]

    def _divide(self, own: Tensor) -> tuple[Tensor, Tensor]:
        v = self.context.detach().expand_as(own)
        if self.network.context == "concatenated":
            u = torch.cat([self._normalize(own), self._normalize(v)], 1)
        else:
            u = self._normalize(own * v if self.network.context == "product" else v)
        r, s = self.attention(u).unbind(1)
        return r, s

    def _predict(self, own: Tensor, r: Tensor, s: Tensor) -> Tensor:
        """Return logits (B, C) from features (B, f) that are divided by r and s."""
        bias = self.global_head.bias
        shared_logits = nn.functional.linear(
            s * own, self.global_head.weight.detach(), None if bias is None else bias.detach()
        )
        return combine_logits(self.head(r * own), shared_logits, self.network.combine)

    def measure_effects(self, x: Tensor) -> tuple[Effect, ...]:
        """Measure the logits beside those of the mean division, and the logits without their mean over classes."""
        own = self.body(x)
        r, s = self._divide(own)
        logits = self._predict(own, r, s)
        change = logits - self._predict(own, r.mean(0), s.mean(0))
        # Predictions do not depend on the mean over classes; the mean over rows takes its place for one number.
        norm = (logits - logits.mean(1 if logits.shape[1] > 1 else 0, keepdim=True)).norm()
        return (Effect(DIVISION, float(change.norm() / norm.clamp_min(1e-30))),)

    def _normalize(self, u: Tensor) -> Tensor:
        # The small eps is for u = 0 alone: products of features and a vector of norm 1 have tiny variances.
        return nn.functional.layer_norm(u, u.shape[1:], eps=1e-12) if self.network.normalize else u

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return logits (B, C); in training, also the personal and the global features (B, f)."""
        own = self.body(x)
        logits = self._predict(own, *self._divide(own))
        if not self.training:
            return logits
        with torch.no_grad():
            shared = self.global_body(x)
        return logits, own, shared

    def objective(self, output: tuple[Tensor, Tensor, Tensor], batch: Batch, loss: LossFunction) -> Tensor:
        logits, own, shared = output
        lam = self.network.lam
        return loss(logits, batch) + lam * self.network.align(own, shared) if lam else loss(logits, batch)


def combine_logits(own: Tensor, shared: Tensor, how: CombinationKind) -> Tensor:
    """Combine the logits (B, C) of two heads: add them, or return the logarithm of the mean probabilities."""
    if how == "logits":
        return own + shared
    return torch.logaddexp(own.log_softmax(1), shared.log_softmax(1)) - torch.log(own.new_tensor(2.0))


@dataclass(frozen=True)
class SeparationNetwork(Network):
    """Base of networks with the user's body and head twice, and an attention module.

    Attributes:
        lam: weight of the alignment loss.
        context: joins features and the client's vector as a `product` or `concatenated`; `client`: the vector alone.
        normalize: whether to standardise each sample's context over the features.
        combine: combines the heads' `logits` or `probabilities`.
        vector: kind of the client's vector; see `make_client_vector`.
        random_first: whether the first vector is drawn, the same for all clients.
    """

    lam: float = 1.0
    context: ContextKind = "product"
    normalize: bool = False
    combine: CombinationKind = "logits"
    vector: VectorKind = "sum"
    random_first: bool = False

    @abstractmethod
    def attention(self, features: int) -> nn.Module:
        """Return a module from contexts (B, f), or (B, 2 f) if concatenated, to weights (B, 2, f) or (B, 2, 1)."""

    @abstractmethod
    def align(self, own: Tensor, shared: Tensor) -> Tensor:
        """Return the distance of personal and global features (B, f)."""

    def wrap(self, model: nn.Module, x: Tensor) -> nn.Module:
        body, head = split_head(model, x)
        weight = head.weight.detach()
        v = torch.rand_like(weight[0]) if self.random_first else make_client_vector(self.vector, weight, weight)
        attention = self.attention(head.in_features).to(weight)
        return SeparationModule(body, head, attention, v / v.norm().clamp_min(1e-12), self)


@dataclass(frozen=True)
class FedAMNetwork(SeparationNetwork):
    """Attention of two linear layers, `hidden` wide (None: 0.19 f), per feature or per sample; CORAL alignment."""

    normalize: bool = True
    vector: VectorKind = "difference"
    hidden: int | None = None
    per_feature: bool = True
    alignment: AlignmentKind = "relative"

    def attention(self, features: int) -> nn.Module:
        inputs = features * (2 if self.context == "concatenated" else 1)
        hidden = max(1, round(0.19 * features)) if self.hidden is None else self.hidden
        return FeatureAttention(inputs, hidden, features if self.per_feature else 1)

    def align(self, own: Tensor, shared: Tensor) -> Tensor:
        return (relative_coral if self.alignment == "relative" else coral)(own, shared)


@dataclass(frozen=True)
class FedCPNetwork(SeparationNetwork):
    """FedCP's conditional policy, with Gumbel noise in training; maximum mean discrepancy."""

    noise: bool = True

    def attention(self, features: int) -> nn.Module:
        return ConditionalPolicy(features, self.noise)

    def align(self, own: Tensor, shared: Tensor) -> Tensor:
        return mmd(own, shared)


TRAINED_PARTS = ("body.", "head.", "attention.")


@dataclass(frozen=True)
class SeparationClient(Optimizing):
    """Client rule of FedAM and FedCP: trains E_p, H_p and A; uploads E_p, A, and a mixture of both heads.

    Attributes:
        reset: whether E_p starts from E_g in every round.
        head_mix: c of the uploaded head (1 - c) H_g + c H_p; the client mixes, so that H_p itself never leaves.
        vector: kind of the client's vector; see `make_client_vector`.
        random_first: whether the client's first round uses the vector of the initial network.
    """

    reset: bool = True
    head_mix: float = 0.5
    vector: VectorKind = "sum"
    random_first: bool = False

    trained_parts = TRAINED_PARTS

    def init_local_state(self, w0: Params) -> LocalState:
        new_state: LocalState = {"received": w0.only(k for k in w0 if k.startswith("global_"))}
        if self.random_first:
            new_state["trained"] = Params(rounds=torch.zeros_like(w0["context"][0]))
        return {**new_state, **super().init_local_state(w0)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> PartCarry:
        w = self.received_model(sent, local_state, fresh)
        return PartCarry(w, self.optimizer.begin(self.select_trained(w), local_state))

    def finish(self, carry: PartCarry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        w, c = carry.w, self.head_mix
        upload = {}
        for k, v in w.items():
            if k.startswith("global_body."):
                upload[k] = w[k.removeprefix("global_")]
            elif k.startswith("global_head."):
                upload[k] = (1 - c) * v + c * w[k.removeprefix("global_")]
            else:
                upload[k] = v
        new_state: LocalState = {"received": w.only(local_state["received"])}
        if self.random_first:
            new_state["trained"] = local_state["trained"] + 1
        return Payload(Params(upload)), {**new_state, **self.optimizer.keep(carry.optimizer)}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        w = sent.params
        v = make_client_vector(self.vector, w["head.weight"], w["global_head.weight"])
        if self.random_first:
            v = torch.where(local_state["trained"]["rounds"] > 0, v, w["context"])
        new = Params({**w, "context": v})
        if self.reset:
            new.update({k: w["global_" + k] for k in w if k.startswith("body.")})
        return new

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return Params({**upload.params, **local_state["received"]})


PERSONAL_MODULES = NamedParameters(("body", "head", "context"))
STARTING_COPIES = (("body", "global_body"), ("head", "global_head"))
