"""The loop over clients with gradients derived by hand: no autograd, products and updates in place.

For logits z, the gradient of the mean cross-entropy over B samples is (softmax(z) - onehot(y)) / B. The loops write
into buffers and add the gradient's product straight into the weights (`addmm_`). With a hidden layer, weights are
stored as (inputs, outputs), so that both products run along memory. Each of these was faster than its alternatives.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .floors import Models, Orders, Train
from .problems import Problem


def by_hand(problem: Problem) -> Train:
    """Train with the loop of this model.

    Raises:
        KeyError: the model has no such loop.
    """
    return {"mlr": _mlr, "dnn": _dnn}[problem.model](problem)


def _batches(problem: Problem, client: int, x: Tensor, y: Tensor, order: Tensor) -> "zip[tuple[Tensor, Tensor]]":
    """Yield the batches of a client as views: inputs, and one-hot labels."""
    size = problem.size(client)
    hot = one_hot(y.index_select(0, order), problem.data.n_classes).to(x.dtype)
    return zip(torch.split(x.index_select(0, order), size), torch.split(hot, size), strict=True)


def _mlr(problem: Problem) -> Train:
    start = list(problem.task.params.values())
    own = [(x.flatten(1), y) for x, y in problem.own]
    logits = torch.empty(problem.batch, problem.data.n_classes, device=problem.data.device)

    @torch.no_grad()
    def train(orders: Orders) -> Models:
        trained = [torch.empty(len(own), *p.shape, device=p.device) for p in start]
        for client, ((x, y), order) in enumerate(zip(own, orders, strict=True)):
            W, b = (t[client] for t in trained)
            W.copy_(start[0])
            b.copy_(start[1])
            across = W.t()
            for xb, hot in _batches(problem, client, x, y, order):
                z = logits[: len(xb)]
                torch.addmm(b, xb, across, out=z)
                torch.softmax(z, 1, out=z)
                z.sub_(hot)
                rate = -problem.lr / len(xb)
                W.addmm_(z.t(), xb, alpha=rate)
                b.add_(z.sum(0), alpha=rate)
        return trained

    return train


def _dnn(problem: Problem) -> Train:
    start = list(problem.task.params.values())
    own = [(x.flatten(1), y) for x, y in problem.own]
    W, b, V, c = (p.t().contiguous() if p.dim() == 2 else p.clone() for p in start)
    device, hidden = problem.data.device, W.shape[1]
    hiddens = torch.empty(problem.batch, hidden, device=device)
    backs = torch.empty(problem.batch, hidden, device=device)
    logits = torch.empty(problem.batch, problem.data.n_classes, device=device)

    @torch.no_grad()
    def train(orders: Orders) -> Models:
        trained = [torch.empty(len(own), *p.shape, device=p.device) for p in start]
        for client, ((x, y), order) in enumerate(zip(own, orders, strict=True)):
            for w, first in zip((W, b, V, c), start, strict=True):
                w.copy_(first.t() if first.dim() == 2 else first)
            for xb, hot in _batches(problem, client, x, y, order):
                n = len(xb)
                h, z, e = hiddens[:n], logits[:n], backs[:n]
                torch.addmm(b, xb, W, out=h).relu_()
                torch.addmm(c, h, V, out=z)
                torch.softmax(z, 1, out=z)
                z.sub_(hot)
                torch.mm(z, V.t(), out=e)
                e.mul_(h > 0)
                rate = -problem.lr / n
                V.addmm_(h.t(), z, alpha=rate)
                c.add_(z.sum(0), alpha=rate)
                W.addmm_(xb.t(), e, alpha=rate)
                b.add_(e.sum(0), alpha=rate)
            for t, w in zip(trained, (W, b, V, c), strict=True):
                t[client].copy_(w.t() if w.dim() == 2 else w)
        return trained

    return train
