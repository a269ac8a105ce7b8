"""FedGH's representations and steps of the global head, worked out by hand."""

from typing import Any

import torch
from torch import Tensor, nn

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedgh import ReadingModule
from fedattune.algorithms.prototypes import READING
from fedattune.core.losses import compute_loss
from fedattune.core.payload import RoundContext


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_head(weight: list[list[float]], bias: list[float]) -> Params:
    return Params({"head.weight": tensor(weight), "head.bias": tensor(bias)})


def aggregate(h: Params, means: Any, known: Any, **options: float) -> Params:
    """Return the head after one round of clients with these representations."""
    rule = ALGORITHMS["fedgh"](**options).server
    ids = torch.arange(len(known))
    state = rule.init(h, len(ids))
    sent = rule.broadcast(state, ids).payload
    uploads = Payload(sent.params, {"representations": Params(means=tensor(means), known=tensor(known))})
    w: Params = rule.aggregate(state, ids, sent, uploads, torch.ones(len(ids)))["w"]
    return w


def test_one_step_of_the_head_by_hand():
    """A zero head gives each of two classes 1/2, so errors are -1/2 for the own class and 1/2 for the other.

    Representations 2 of class 0 and 4 of class 1: the gradient of weight 0 is (-1/2 * 2 + 1/2 * 4) / 2 = 1/2, that of
    weight 1 is -1/2; those of the biases are zero. With class 0 alone, they are -1 and 1, and -1/2 and 1/2.
    """
    zero = make_head([[0.0], [0.0]], [0.0, 0.0])
    both = aggregate(zero, [[[2.0], [4.0]]], [[1.0, 1.0]], server_lr=0.1)
    torch.testing.assert_close(both["head.weight"], tensor([[-0.05], [0.05]]))
    torch.testing.assert_close(both["head.bias"], tensor([0.0, 0.0]))
    one = aggregate(zero, [[[2.0], [0.0]]], [[1.0, 0.0]], server_lr=0.1)
    torch.testing.assert_close(one["head.weight"], tensor([[0.1], [-0.1]]))
    torch.testing.assert_close(one["head.bias"], tensor([0.05, -0.05]))


def test_one_step_for_each_client_in_turn():
    """Two clients with representation 2 of class 0 alone, or two passes over one of them, are two steps of lr 1/2.

    After the first step, weights are 1/2 and -1/2, biases 1/4 and -1/4, and logits 5/4 and -5/4. So class 1 has the
    probability p = 1 / (1 + exp(5/2)), and the second step adds p to weight 0 and p / 2 to bias 0.
    """
    zero = make_head([[0.0], [0.0]], [0.0, 0.0])
    p = 1 / (1 + torch.exp(tensor(2.5)))
    client = [[2.0], [0.0]], [1.0, 0.0]
    for h in (
        aggregate(zero, [client[0]] * 2, [client[1]] * 2, server_lr=0.5),
        aggregate(zero, [client[0]], [client[1]], server_lr=0.5, server_epochs=2),
    ):
        torch.testing.assert_close(h["head.weight"][:, 0], torch.stack([0.5 + p, -0.5 - p]))
        torch.testing.assert_close(h["head.bias"], torch.stack([0.25 + p / 2, -0.25 - p / 2]))


def test_the_gradient_is_that_of_the_mean_cross_entropy():
    """A client with classes 0 and 2 of three, and a head without bias: the same as PyTorch's gradient."""
    torch.manual_seed(0)
    weight, means = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, dtype=torch.float64)
    torch.nn.functional.cross_entropy(means[[0, 2]] @ weight.T, torch.tensor([0, 2])).backward()
    h = Params({"head.weight": weight.detach()})
    new = aggregate(h, means[None].tolist(), [[1.0, 0.0, 1.0]], server_lr=1.0)
    torch.testing.assert_close(h["head.weight"] - new["head.weight"], weight.grad)


def test_representations_count_and_the_returned_head_does_not():
    """Two clients with two classes of one feature, and two flags: 2 * 4 doubles; the head is as large."""
    rule, h, ids = ALGORITHMS["fedgh"]().server, make_head([[0.0], [0.0]], [0.0, 0.0]), torch.arange(2)
    state = rule.init(h, 2)
    representations = Params(means=tensor([[[1.0], [2.0]]] * 2), known=tensor([[1.0, 1.0]] * 2))
    uploads = Payload(rule.broadcast(state, ids).payload.params, {"representations": representations})
    assert rule.bytes_up(state, ids, uploads) == {"representations": 64}


def test_upload_by_hand():
    """Features are the inputs: class 0 has (1, 0) and (3, 4), so its mean is (2, 2); class 1 has none; class 2 (0, 2).

    The head goes back as it came; the trained one, after a step of rate 1 on the gradient 2, stays with the client.
    """
    head = nn.Linear(2, 3).double()
    module = ReadingModule(nn.Identity(), head)
    batch = (tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]]), torch.tensor([0, 0, 2]))
    module.objective(module(batch[0]), batch, compute_loss).backward()
    torch.testing.assert_close(module.sums.grad, READING * tensor([[4.0, 4.0], [0.0, 0.0], [0.0, 2.0]]))
    rule, w = ALGORITHMS["fedgh"]().client, Params({k: v.detach() for k, v in module.named_parameters()})
    g = Params({**(w.zeros() + 2.0), "sums": module.sums.grad, "counts": module.counts.grad})
    sent, one = Payload(w), tensor(1.0)
    context = RoundContext(1.0, one, one, 1)
    state = rule.init_local_state(w)
    carry = rule.begin(sent, state, torch.tensor(True), context)
    carry = rule.step(carry, batch, lambda w, batch: g, context)
    upload, state = rule.finish(carry, sent, state, context)
    representations = upload.extra["representations"]
    torch.testing.assert_close(representations["means"], tensor([[2.0, 2.0], [0.0, 0.0], [0.0, 2.0]]))
    assert representations["known"].tolist() == [1.0, 0.0, 1.0]
    assert torch.equal(upload.params["head.bias"], w["head.bias"])
    torch.testing.assert_close(rule.trained_model(upload, state)["head.bias"], w["head.bias"] - 2.0)
