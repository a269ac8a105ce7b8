"""Mixing matrices that are learned: one hypernetwork per client says how it weighs the others' layers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State
from ..params import Params
from ..select import Unit, groups
from .bank import Bank, mixed
from .hypernetwork import features, linear, named, normal, part, trunk, uniform

Norm = Literal["softmax", "relu_sum"]
EPS = 1e-6
"""Added to every weight of `relu_sum`, so that a row never is zero altogether."""


class Rows(NamedTuple):
    """Whose mixtures are meant, R of them, out of a bank of K models.

    Attributes:
        own: (R,) the position of each one's own model.
        allowed: (R, K) whether it may be given a model.

    """

    own: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class Learned(Bank):
    """Client i is sent sum_k alpha_i^l[k] theta_l[k], where alpha_i = HN_i(v_i; psi_i) has a row per component l.

    Source: pFedLA (Ma et al., 2022). HN_i is an embedding v_i, three linear layers with ReLU, and a linear head per
    component, normalised over the K models of the bank. With G_i what client i was sent minus what it uploaded, which
    stands for the gradient of its loss, d loss / d alpha_i^l[k] = <theta_l[k], G_i,l> over the bank as it was when
    sent; this goes back through HN_i, whose values take one plain gradient step.

    Attributes:
        unit: what has a row of its own: the whole `model`, a `layer` (weight and bias), or each `tensor`.
        hn_lr: rate of that step.
        embedding, hidden: width of v_i and of the linear layers.
        norm: `softmax` with heads that start at zero, so that mixing starts as the plain mean; `relu_sum` with heads
            from U(0, 1), as public code has it.

    """

    unit: Unit = "layer"
    hn_lr: float = 5e-3
    embedding: int = 100
    hidden: int = 100
    norm: Norm = "softmax"

    def init(self, w0: Params, n_clients: int) -> State:
        """The bank, whose models all can be mixed from the start, and a hypernetwork per client."""
        state = super().init(w0, n_clients)
        everybody = torch.ones_like(cast(Tensor, state["in_pool"]))
        return {**state, "in_pool": everybody, "hypernetworks": self._draw(w0, n_clients, n_clients)}

    def _draw(self, w0: Params, n: int, outputs: int) -> Params:
        """Hypernetworks of n clients that weigh so many models."""
        like = next(iter(w0.values()), torch.zeros(()))  # nothing at all may be shared
        heads = linear(self.hidden, (len(groups(w0, self.unit)), outputs), like, (n,)).zeros()
        if self.norm == "relu_sum":
            heads["weight"] = uniform(0, 1, heads["weight"].shape, like)
        layers = trunk((self.embedding, *[self.hidden] * 3), like, (n,))
        v = normal((n, self.embedding), like)
        return Params({"embedding": v, **named("trunk.", layers), **named("head.", heads)})

    def rows(self, state: State, ids: Tensor) -> Rows:
        """Which models clients `ids` can be given: their own, and those of all who took part in training."""
        in_pool = cast(Tensor, state["in_pool"])
        return Rows(ids, in_pool.expand(len(ids), -1).scatter(1, ids[:, None], True))

    def alpha(self, networks: Params, rows: Rows) -> Tensor:
        """The mixing weights (R, L, K) of all L components, from the hypernetworks of R clients."""
        h = features(part(networks, "trunk."), networks["embedding"]).relu()
        z = torch.einsum("rlkh,rh->rlk", networks["head.weight"], h) + networks["head.bias"]
        allowed = rows.allowed[:, None]
        if self.norm == "softmax":
            return torch.softmax(z.masked_fill(~allowed, -torch.inf), 2)
        positive = (z.relu() + EPS) * allowed
        return positive / positive.sum(2, keepdim=True)

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices:
        """One matrix per component, whose columns are all clients."""
        networks = cast(Params, state["hypernetworks"])
        alpha = self.alpha(networks.rows(ids), self.rows(state, ids))
        columns = torch.arange(alpha.shape[2], device=ids.device)
        components = groups(cast(Params, state["theta"]), self.unit)
        return MixingMatrices(ids, columns, {c: alpha[:, i] for i, c in enumerate(components)})

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The mixture that each of clients `ids` is sent."""
        return Payload(mixed(cast(Params, state["theta"]), self.unit, self.mixing(state, ids)))

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Take a step of the cohort's hypernetworks (written in place), then keep what came back."""
        networks = cast(Params, state["hypernetworks"])
        if state["theta"]:
            gradient = self.gradient(state, ids, sent.params - received.params)
            networks.put_rows(ids, networks.rows(ids) - self.hn_lr * gradient)
        return super().aggregate(state, ids, sent, received, n)

    def gradient(self, state: State, ids: Tensor, G: Params) -> Params:
        """The gradient of the loss of clients `ids` by their hypernetworks, where G is that by what they were sent."""
        theta = cast(Params, state["theta"])
        # A row of alpha sums to 1, so what all models share cannot matter; without it, little is lost to rounding.
        inner = [
            torch.stack([_rows(G[k]) @ _rows(theta[k] - theta[k][:1]).T for k in names]).sum(0)
            for names in groups(theta, self.unit).values()
        ]
        with torch.enable_grad():
            networks = cast(Params, state["hypernetworks"]).rows(ids).map(lambda a: a.requires_grad_())
            alpha = self.alpha(networks, self.rows(state, ids))
            values = torch.autograd.grad(alpha, list(networks.values()), torch.stack(inner, 1))
        return Params(zip(networks, values, strict=True))

    def join(self, state: State, n: int) -> State:
        """The state with `n` more clients, which weigh the models of those before them and their own."""
        joined, w0 = super().join(state, n), self.newcomer(state)
        old = cast(Params, state["hypernetworks"])
        new = self._draw(w0, n, len(cast(Tensor, joined["n"])))
        # Those who were there go on weighing the same models: the new columns are not allowed to them.
        wider = {
            k: torch.cat([old[k], old[k].new_zeros(*old[k].shape[:2], n, *old[k].shape[3:])], 2)
            for k in ("head.weight", "head.bias")
        }
        both = Params({**old, **wider}).map(lambda a, b: torch.cat([a, b]), new)
        return {**joined, "hypernetworks": both}


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)
