"""Mean features of classes (prototypes), which clients read from gradients: for FedProto, FedGH, FedPAC, FedDBE."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..client import Optimizing
from ..core.params import Params
from ..core.payload import Batch, Grad, LocalState, Payload, RoundContext

DistanceKind = Literal["samples", "classes"]

READING = 1e-4
"""Factor of the sums that clients read from the gradient: their part of its norm, which may be limited, is small."""

SMALLEST_SQUARE = 1e-12
"""Keeps the slope of a distance of 0 finite."""

READERS = ("sums", "counts")
"""Names of the parameters from whose gradients clients read features."""


def make_readers(head: nn.Linear) -> tuple[nn.Parameter, nn.Parameter]:
    """Return zero `sums` (C, f) and `counts` (C,) for a head of C classes and f features; see `read_features`."""
    zeros = head.weight.detach().new_zeros(head.out_features, head.in_features)
    return nn.Parameter(zeros), nn.Parameter(zeros[:, 0].clone())


def encode_classes(y: Tensor, like: Tensor) -> Tensor:
    """Return classes y (B,) as rows (B, C) with a single 1; `like` (C,) has the type."""
    return (y[:, None] == torch.arange(len(like), device=y.device)).to(like.dtype)


def read_features(f: Tensor, one_hot: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Return a term of the loss that is 0, and whose gradients tell the features (B, f) of each class.

    The values of `sums` (C, f) and `counts` (C,) are always zero. Their gradients are the sums of the features of each
    class over the batch, and the numbers of samples, times `READING`.
    """
    return READING * ((sums * (one_hot.T @ f.detach())).sum() + (counts * one_hot.sum(0)).sum())


def measure_distance(f: Tensor, one_hot: Tensor, prototypes: Tensor, known: Tensor, kind: DistanceKind) -> Tensor:
    """Return the distance R of features (B, f) from the prototypes (C, f) of their classes, for the `known` (C,) ones.

    `samples`: the mean square of all differences; `classes`: the sum over classes of the distance of the batch's mean.
    """
    if kind == "samples":
        return ((one_hot @ known)[:, None] * (f - one_hot @ prototypes).square()).mean()
    counts = one_hot.sum(0)
    means = one_hot.T @ f / counts.clamp_min(1)[:, None]
    distances = ((means - prototypes).square().sum(1) + SMALLEST_SQUARE).sqrt()
    return ((counts > 0) * known * distances).sum()


def divide(sums: Tensor, weights: Tensor) -> Tensor:
    """Return sums (C, f) over weights (C,) or one weight; 0 where there is no weight, if the sums are 0 there."""
    return sums / torch.where(weights > 0, weights, 1)[..., None]


def select_head(w: Params) -> Params:
    """Return the tensors of the head."""
    return w.only(k for k in w if k.startswith("head."))


class ReadingCarry(NamedTuple):
    """The carry of `ReadingClient`: the model, what it read so far, and the state of the optimizer."""

    w: Params
    sums: Tensor
    counts: Tensor
    optimizer: LocalState


@dataclass(frozen=True)
class ReadingClient(Optimizing):
    """Base of client rules that train a model, and read the features of all samples in their local steps."""

    trained_parts = ("body.", "head.")

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> Any:
        w = sent.params
        sums, counts = torch.zeros_like(w["sums"]), torch.zeros_like(w["counts"])
        return ReadingCarry(w, sums, counts, self.optimizer.begin(self.select_trained(w), local_state))

    def step(self, carry: Any, batch: Batch, grad: Grad, context: RoundContext) -> Any:
        g = grad(carry.w, batch)
        trained, optimizer = self.optimizer.step(
            self.select_trained(carry.w), self.select_trained(g), carry.optimizer, context.lr
        )
        w, sums, counts = Params({**carry.w, **trained}), carry.sums + g["sums"], carry.counts + g["counts"]
        return carry._replace(w=w, sums=sums, counts=counts, optimizer=optimizer)
