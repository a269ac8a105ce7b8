"""The floor: the best plain PyTorch that a good engineer writes, one client after the other, with autograd.

Samples are loaded, normalized and in memory before the clock starts. A round gathers each client's samples once, in the
order of its batches, so that batches are views. One call moves all tensors of one working copy of the model in place.
`torch.autograd.grad` differentiates the loss, without an optimizer object. Small models are written out, since calling
modules costs as much as their arithmetic. Each choice was at least as fast as its alternatives (indexing per step,
`functional_call`, `no_grad` around the update, one `add_` per tensor).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d

from .problems import Problem

Orders = list[Tensor]
Models = list[Tensor]
"""Trained tensors of all clients, each (C, ...), in the order of `task.params`."""

Train = Callable[[Orders], Models]
Forward = Callable[[Sequence[Tensor], Tensor], Tensor]


def mlr(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute the logits of multinomial logistic regression."""
    return linear(x, w[0], w[1])


def dnn(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute the logits of a network with one hidden layer."""
    return linear(linear(x, w[0], w[1]).relu(), w[2], w[3])


def lenet(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Compute the logits of a network with two convolutions and three linear layers."""
    for kernel, bias in (w[:2], w[2:4]):
        x = max_pool2d(conv2d(x, kernel, bias).relu_(), 2)
    return linear(linear(linear(x.flatten(1), w[4], w[5]).relu(), w[6], w[7]).relu(), w[8], w[9])


WRITTEN_OUT: dict[str, Forward] = {"mlr": mlr, "dnn": dnn}
"""Networks of linear layers, whose samples are flat."""

EVALUATED_AS = {**WRITTEN_OUT, "lenet": lenet}


def plain(problem: Problem) -> Train:
    """Train with a hand-written loop; convolutional models are called as modules."""
    model = deepcopy(problem.task.model).train()
    w = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in w]
    statistics = list(model.buffers())
    fresh = [b.clone() for b in statistics]
    forward: Forward = WRITTEN_OUT.get(problem.model, lambda _, x: model(x))
    flat = problem.model in WRITTEN_OUT
    own = [(x.flatten(1) if flat else x, y) for x, y in problem.own]

    def train(orders: Orders) -> Models:
        values = [p.detach() for p in w]  # the same memory, out of autograd's sight
        trained = [torch.empty(len(own), *p.shape, device=p.device) for p in w]
        for client, ((x, y), order) in enumerate(zip(own, orders, strict=True)):
            torch._foreach_copy_(values, start)
            for statistic, value in zip(statistics, fresh, strict=True):
                statistic.copy_(value)
            size = problem.size(client)
            batches = zip(
                torch.split(x.index_select(0, order), size), torch.split(y.index_select(0, order), size), strict=True
            )
            for xb, yb in batches:
                gradients = torch.autograd.grad(cross_entropy(forward(w, xb), yb), w)
                torch._foreach_add_(values, gradients, alpha=-problem.lr)
            torch._foreach_copy_([t[client] for t in trained], values)
        return trained

    return train
