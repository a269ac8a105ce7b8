"""FedPAC's statistics, combination of heads, centroids and steps, worked out by hand."""

import math
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from fedattune import Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedpac import CentroidModule, combine_heads, compute_statistics
from fedattune.algorithms.prototypes import READING
from fedattune.core.losses import compute_loss
from fedattune.core.optimizers import Adam
from fedattune.core.payload import RoundContext


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_statistics_by_hand():
    """Four rows: features (1, 0) and (3, 4) of class 0, (0, 2) twice of class 1.

    Class 0 has the share 1/2 and the mean (2, 2), so h = (1, 1); class 1 has the mean (0, 2), so h = (0, 1). The mean
    square norm is (1 + 25 + 4 + 4) / 4 = 8.5, and V = (8.5 - (2 + 1)) / 4. The gradients tell the sums.
    """
    module = CentroidModule(nn.Identity(), nn.Linear(2, 3).double(), 1.0)
    batch = (tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [0.0, 2.0]]), torch.tensor([0, 0, 1, 1]))
    module.objective(module(batch[0]), batch, compute_loss).backward()
    torch.testing.assert_close(module.sums.grad, READING * tensor([[4.0, 4.0, 26.0], [0.0, 4.0, 8.0], [0.0, 0.0, 0.0]]))
    for factor in (1.0, 0.1):  # a limit of the gradient's norm shrinks all that is read
        h, V = compute_statistics(factor * module.sums.grad, factor * module.counts.grad, tensor(4.0))
        torch.testing.assert_close(h, tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]))
        torch.testing.assert_close(V, tensor(5.5 / 4))


def test_loss_by_hand():
    """Rows (1, 0) of class 0, whose centroid is (1, 2), and (3, 4) of class 1, which has none; lam is 3.

    The squares of the first row's differences are 0 and 4, so their mean over two rows of two features is 1. Three
    equal logits cost log 3.
    """
    head = nn.Linear(2, 3, bias=False).double()
    nn.init.zeros_(head.weight)
    module, batch = CentroidModule(nn.Identity(), head, 3.0), (tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([0, 1]))
    with torch.no_grad():
        module.centroids[0], module.known[0] = tensor([1.0, 2.0]), 1.0
    loss = module.objective(module(batch[0]), batch, compute_loss)
    torch.testing.assert_close(loss, tensor(math.log(3) + 3))
    loss.backward()
    assert module.centroids.grad is None


def test_combinations_by_hand():
    """Client 0 minimizes a^2 V_0 + (1 - a)^2 (V_1 + d), d = ||h_0 - h_1||^2, so a = (V_1 + d) / (V_0 + V_1 + d).

    V = (1, 2) and d = 9: a = 11 / 12; for client 1, the weight of its own head is (1 + 9) / 12. With equal h, weights
    are as 1 / V; without any difference, they are equal.
    """
    h = tensor([[1.0, 2.0], [4.0, 2.0]])
    expected = tensor([[11 / 12, 1 / 12], [2 / 12, 10 / 12]])
    torch.testing.assert_close(combine_heads(h, tensor([1.0, 2.0])), expected)
    torch.testing.assert_close(combine_heads(0 * h, tensor([1.0, 2.0])), tensor([[2 / 3, 1 / 3]] * 2))
    torch.testing.assert_close(combine_heads(h[:1], tensor([0.0])), tensor([[1.0]]))
    torch.testing.assert_close(combine_heads(0 * h, tensor([0.0, 0.0])), tensor([[0.5, 0.5]] * 2))


def test_combinations_are_those_of_another_solver():
    """Five clients: the rows reach what a general solver of the quadratic programme reaches, some with weights of 0."""
    generator = torch.Generator().manual_seed(0)
    h, V = (torch.rand(5, *shape, generator=generator, dtype=torch.float64) for shape in ((3,), ()))
    alpha = combine_heads(h, 0.05 * V)
    assert (alpha == 0).any()
    for i, row in enumerate(alpha):
        D = (h[i] - h).numpy()
        Q = torch.diag(0.05 * V).numpy() + D @ D.T
        other = minimize(
            lambda a, Q=Q: a @ Q @ a, [0.2] * 5, jac=lambda a, Q=Q: 2 * Q @ a, bounds=[(0, 1)] * 5, method="SLSQP",
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1}, options={"ftol": 1e-14},
        )  # fmt: skip
        assert abs(other.fun - row.numpy() @ Q @ row.numpy()) < 1e-9


def test_server_by_hand():
    """Two clients of 1 and 3 rows, with V = (1, 2) and h = 1 and 4: weights 11/12 and 1/12, 1/6 and 5/6, as above.

    Heads 0 and 12: combinations 1 and 10, mean 9. Bodies 2 and 6: mean 5. Client 0 has class 0 alone, with mean 8; for
    client 1 it is a third, with mean 4: (1 * 8 + 1 * 4) / 2 = 6. Class 1 has the mean 5 of client 1, class 2 none.
    A third client, which never uploaded, is sent the mean head.
    """
    rule = ALGORITHMS["fedpac"]().server
    w = Params({"body.a": tensor([0.0]), "head.weight": tensor([[0.0]] * 3)})
    state, ids, everybody = rule.init(w, 3), torch.arange(2), torch.arange(3)
    heads = tensor([[[0.0]] * 3, [[12.0]] * 3])
    uploads = Payload(
        Params({"body.a": tensor([[2.0], [6.0]]), "head.weight": heads}),
        {
            "features": Params(
                means=tensor([[[8.0], [0.0], [0.0]], [[4.0], [5.0], [0.0]]]),
                shares=tensor([[1.0, 0.0, 0.0], [1 / 3, 2 / 3, 0.0]]),
            ),
            "statistics": Params(h=tensor([[[1.0], [2.0], [0.0]], [[4.0], [2.0], [0.0]]]), V=tensor([1.0, 2.0])),
        },
    )
    state = rule.aggregate(state, ids, rule.broadcast(state, ids).payload, uploads, torch.tensor([1, 3]))
    sent, mixing = rule.broadcast(state, everybody)
    assert mixing is None
    torch.testing.assert_close(sent.params["body.a"][:, 0], tensor([5.0] * 3))
    torch.testing.assert_close(sent.params["head.weight"][:, 0, 0], tensor([1.0, 10.0, 9.0]))
    torch.testing.assert_close(sent.extra["centroids"]["means"][2, :, 0], tensor([6.0, 5.0, 0.0]))
    assert sent.extra["centroids"]["has_one"][0].tolist() == [1.0, 1.0, 0.0]
    mixing = rule.broadcast(state, ids).mixing
    torch.testing.assert_close(mixing.weights["head"], tensor([[11 / 12, 1 / 12], [1 / 6, 5 / 6]]))


def start_client(**options: Any) -> tuple[Any, Any, Params, Payload, RoundContext]:
    """A client of body 1 and head 1, which was sent the centroid 7: the rule, its carry, a gradient, and the rest.

    All gradients are 1; those that read features tell of two rows, with the sum 6 and the sum of squares 20.
    """
    rule, one = ALGORITHMS["fedpac"](head_epochs=2).client, tensor(1.0)
    if options:
        rule = rule.with_optimizer(Adam(**options))
    w = Params({"body.a": one, "head.weight": one, "centroids": one, "known": one, "sums": tensor([[0.0, 0.0]])})
    w["counts"] = tensor([0.0])
    sent = Payload(w, {"centroids": Params(means=tensor([[7.0]]), has_one=tensor([1.0]))})
    g = Params({**w.map(torch.ones_like), "sums": READING * tensor([[6.0, 20.0]]), "counts": READING * tensor([2.0])})
    context = RoundContext(0.1, 3 * one, one, 1)
    carry = rule.begin(sent, rule.init_local_state(w), torch.tensor(True), context)
    return rule, carry, g, sent, context


ROWS = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))


def test_head_first_then_body_by_hand():
    """Gradients of 1, rate 0.1, two steps on the head and one on the body; features count in the body's steps alone."""
    rule, carry, g, sent, context = start_client()
    assert carry.w["centroids"].item() == 7.0
    carry = rule.probe(carry, ROWS, lambda w, batch, **_: g, None, context)
    for head, body in ((0.9, 1.0), (0.8, 1.0), (0.8, 0.9)):
        carry = rule.step(carry, ROWS, lambda w, batch: g, context)
        torch.testing.assert_close(carry.w["head.weight"], tensor(head))
        torch.testing.assert_close(carry.w["body.a"], tensor(body))
    upload, _ = rule.finish(carry, sent, {}, context)
    assert upload.extra["features"]["means"].item() == 3.0
    assert upload.extra["features"]["shares"].item() == 1.0
    # h = 6 / 2 and V = (20 / 2 - 3^2) / 2.
    torch.testing.assert_close(upload.extra["statistics"]["h"], tensor([[3.0]]))
    torch.testing.assert_close(upload.extra["statistics"]["V"], tensor(0.5))


def test_the_optimizer_leaves_the_frozen_part_alone():
    """AdamW decays every tensor that it is given, and all moments; those of the part that is not trained stay."""
    rule, carry, g, _, context = start_client(weight_decay=0.5)
    for _ in range(2):
        carry = rule.step(carry, ROWS, lambda w, batch: g, context)
    assert carry.w["body.a"].item() == 1.0
    assert carry.optimizer["m"]["body.a"].item() == 0.0
    head, moment = carry.w["head.weight"].item(), carry.optimizer["m"]["head.weight"].item()
    assert head < 0.9
    assert moment > 0.1
    carry = rule.step(carry, ROWS, lambda w, batch: g, context)
    assert carry.w["head.weight"].item() == head
    assert carry.optimizer["m"]["head.weight"].item() == moment
    assert carry.w["body.a"].item() < 1.0


def test_the_distance_counts_in_the_steps_of_the_body_alone():
    """R adds 3 to the body's gradient of 1. The head's steps, with a gradient of 1, stay the same."""
    rule, carry, g, _, context = start_client()

    def grad(w: Params, batch: Any, **_: Any) -> Params:
        return Params({**g, "body.a": g["body.a"] + 3 * w["known"][0]})

    for expected in ((0.0, 1.0), (0.0, 1.0), (9.0, 1.0)):
        ((change, norm),) = rule.measure_step(carry, ROWS, grad, context)
        assert (change.item(), norm.item()) == expected
        carry = rule.step(carry, ROWS, lambda w, batch: g, context)
