"""Mixing matrices that are learned: one hypernetwork per client says how it weighs the others' layers."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..core import MixingMatrices, Payload, State
from ..params import Params, as_slice
from ..select import Unit, groups
from .bank import Bank, mixed, update_rows
from .hypernetwork import dense, features, linear, named, normal, part, trunk, uniform
from .products import flat, pieces

Norm = Literal["softmax", "relu_sum"]
AT_ONCE = 1 << 22
"""Values of hypernetworks that are copied at a time."""

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

    def logits(self, state: State, ids: Tensor) -> Tensor:
        """What the hypernetworks of clients `ids` say, (R, L, K), before it is normalised."""
        networks = cast(Params, state["hypernetworks"])
        blocks = [networks.rows(as_slice(block)) for block in self._blocks(state, ids)]
        return torch.cat([_scores(_features(rows), rows) for rows in blocks])

    def alpha(self, z: Tensor, rows: Rows) -> Tensor:
        """The mixing weights (R, L, K) of all L components, from what R hypernetworks say."""
        allowed = rows.allowed[:, None]
        if self.norm == "softmax":
            return torch.softmax(z.masked_fill(~allowed, -torch.inf), 2)
        positive = (z.relu() + EPS) * allowed
        return positive / positive.sum(2, keepdim=True)

    def mixing(self, state: State, ids: Tensor) -> MixingMatrices:
        """One matrix per component, whose columns are all clients."""
        return self._matrices(state, ids, self.alpha(self.logits(state, ids), self.rows(state, ids)))

    def _matrices(self, state: State, ids: Tensor, alpha: Tensor) -> MixingMatrices:
        columns = torch.arange(alpha.shape[2], device=ids.device)
        components = groups(cast(Params, state["theta"]), self.unit)
        return MixingMatrices(ids, columns, {c: alpha[:, i] for i, c in enumerate(components)})

    def broadcast(self, state: State, ids: Tensor) -> Payload:
        """The mixture that each of clients `ids` is sent."""
        return Payload(mixed(cast(Params, state["theta"]), self.unit, self.mixing(state, ids)))

    def aggregate(self, state: State, ids: Tensor, sent: Payload, received: Payload, n: Tensor) -> State:
        """Take a step of the cohort's hypernetworks (written in place), then keep what came back."""
        self.learn(state, ids, sent.params, received.params)
        return super().aggregate(state, ids, sent, received, n)

    def learn(self, state: State, ids: Tensor, sent: Params, received: Params) -> None:
        """Take a step of the hypernetworks of clients `ids`, which were `sent` that and uploaded what is `received`."""
        if not state["theta"]:
            return
        networks, by_alpha, start = (
            cast(Params, state["hypernetworks"]),
            self._by_alpha(state, sent, received),
            0,
        )
        for block in self._blocks(state, ids):
            gradient = by_alpha[start : start + len(block)]
            step = partial(self._step, rows=self.rows(state, block), by_alpha=gradient)
            update_rows(networks, block, step)
            start += len(block)

    def _blocks(self, state: State, ids: Tensor) -> tuple[Tensor, ...]:
        """The clients, so many at a time that copies of their hypernetworks stay small."""
        heads = (
            len(groups(cast(Params, state["theta"]), self.unit)) * len(cast(Tensor, state["n"])) * self.hidden
        )
        return torch.split(ids, max(1, AT_ONCE // max(1, heads)))

    def _by_alpha(self, state: State, sent: Params, received: Params) -> Tensor:
        """The gradient (R, L, K) of R clients' losses by their mixing weights: <theta_l[k], G_i,l>."""
        theta = cast(Params, state["theta"])
        components = groups(theta, self.unit)
        like = next(iter(sent.values()))
        out = like.new_zeros(len(like), len(components), len(cast(Tensor, state["n"])))
        for i, name in ((i, name) for i, names in enumerate(components.values()) for name in names):
            models = flat(theta.only([name]).rows(slice(None))[name])
            before, after = flat(sent[name]), flat(received[name])
            for c in pieces(len(models) + len(like), models.shape[1]):
                # A row of alpha sums to 1, so what all models share cannot matter; without it, little is lost to
                # rounding.
                out[:, i].addmm_(before[:, c] - after[:, c], (models[:, c] - models[:1, c]).T)
        return out

    def _step(self, networks: Params, rows: Rows, by_alpha: Tensor) -> None:
        """Change R hypernetworks by one step, given the gradient (R, L, K) by what they make."""
        heads = networks["head.weight"].flatten(1, 2)
        small = networks.without(("head.weight", "head.bias"))
        with torch.enable_grad():
            leaves = small.map(lambda a: a.detach().requires_grad_())
            h = _features(leaves)
            z = _scores(h.detach(), networks).requires_grad_()
            (by_z,) = torch.autograd.grad(self.alpha(z, rows), z, by_alpha)
            by_h = (by_z.flatten(1)[:, None] @ heads)[:, 0]
            values = torch.autograd.grad(h, list(leaves.values()), by_h)
        for old, g in zip(small.values(), values, strict=True):
            old.sub_(g, alpha=self.hn_lr)
        networks["head.bias"].sub_(by_z, alpha=self.hn_lr)
        # The heads are most of it, and their gradient is a product of two vectors that need not be written out.
        heads.baddbmm_(by_z.flatten(1)[:, :, None], h.detach()[:, None], alpha=-self.hn_lr)

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


def _features(networks: Params) -> Tensor:
    """What goes into the heads (R, hidden)."""
    return features(part(networks, "trunk."), networks["embedding"]).relu()


def _scores(h: Tensor, networks: Params) -> Tensor:
    """What the heads of R hypernetworks make of h (R, hidden): (R, L, K)."""
    bias = networks["head.bias"]
    return dense(h, networks["head.weight"].flatten(1, 2), bias.flatten(1)).view(bias.shape)
