"""FedDBE's distance, mean features, bias and consensus, worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import ConfigError, Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.feddbe import BiasModule
from fedattune.algorithms.prototypes import READING
from fedattune.core.losses import compute_loss
from fedattune.core.options import build
from fedattune.core.payload import RoundContext

FEATURES = [[1.0, 0.0], [3.0, 4.0]]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_module(known: float) -> BiasModule:
    """Features are the inputs, kappa is 2 and mu 1/2; the mean so far is (1, 0), and the consensus (0.5, -1)."""
    head = nn.Linear(2, 2, bias=False).double()
    nn.init.zeros_(head.weight)
    module = BiasModule(nn.Identity(), head, 2.0, 0.5)
    with torch.no_grad():
        module.mean.copy_(tensor([1.0, 0.0]))
        module.consensus.copy_(tensor([0.5, -1.0]))
        module.known.fill_(known)
    return module


@pytest.mark.parametrize(("known", "distance"), [(1.0, 2.5), (0.0, 0.0)])
def test_loss_by_hand(known: float, distance: float):
    """The batch's mean is (2, 2), so the new mean is (1.5, 1), which differs from the consensus by (1, 2).

    kappa / 2 times the mean square is 2 / 2 * 5 / 2 = 2.5; without a consensus it is 0. Two equal logits cost log 2.
    The sum of the features is (4, 4), from two samples. The parameters beside the model have no other gradient.
    """
    module, batch = make_module(known), (tensor(FEATURES), torch.tensor([0, 1]))
    loss = module.objective(module(batch[0]), batch, compute_loss)
    assert loss.item() == pytest.approx(math.log(2) + distance)
    loss.backward()
    torch.testing.assert_close(module.sums.grad, READING * tensor([[4.0, 4.0]]))
    torch.testing.assert_close(module.counts.grad, READING * tensor([2.0]))
    assert all(part.grad is None for part in (module.mean, module.consensus, module.known))


def test_prediction_adds_the_bias_to_the_features():
    """With the identity as head, (1, 0) and the bias (0, 2) give (1, 2)."""
    module = make_module(1.0).eval()
    with torch.no_grad():
        module.head.weight.copy_(torch.eye(2))
        module.bias.copy_(tensor([0.0, 2.0]))
    torch.testing.assert_close(module(tensor([[1.0, 0.0]])), tensor([[1.0, 2.0]]))


@pytest.mark.parametrize(("known", "bias", "consensus"), [(0.0, 5.0, 2.5), (1.0, 4.4, 7.0)])
def test_upload_by_hand(known: float, bias: float, consensus: float):
    """Batches of 2 and 1 rows with means 2 and 4: with mu = 1/2, the mean is 1, then 0.5 + 2 = 2.5.

    Without a consensus the bias stays, and 2.5 is uploaded; with one, two steps of 0.1 with gradient 3 lead from 5 to
    4.4, and the consensus 7 is sent back. The rest of the model moves from 1 by 2 * 0.1 * 2 to 0.6.
    """
    rule = ALGORITHMS["feddbe"](mu=0.5).client
    zero = tensor([0.0])
    sent = Payload(
        Params({"body.a": zero + 1, "bias": zero + 5, "mean": zero + 9, "consensus": zero + 7, "known": zero + known,
                "sums": zero[None], "counts": zero})
    )  # fmt: skip
    one = tensor(1.0)
    context = RoundContext(0.1, 2 * one, one, 1)
    carry = rule.begin(sent, {}, torch.tensor(True), context)
    for total, count in ((4.0, 2.0), (4.0, 1.0)):
        read = {"sums": READING * tensor([[total]]), "counts": READING * tensor([count])}
        gradient = Params({**sent.params, **read, "body.a": zero + 2, "bias": zero + 3})
        carry = rule.step(carry, (), lambda w, batch, g=gradient: Params(g), context)
    upload, _ = rule.finish(carry, sent, {}, context)
    found = {k: upload.params[k].item() for k in ("body.a", "bias", "consensus", "known")}
    assert found == pytest.approx({"body.a": 0.6, "bias": bias, "consensus": consensus, "known": 1.0})


def test_the_first_average_stays_the_consensus():
    """Means 2 of 4 rows and 4 of 12: (4 * 2 + 12 * 4) / 16 = 3.5, also after the next round; w is averaged anew."""
    rule = ALGORITHMS["feddbe"]().server
    zero, ids = tensor([0.0]), torch.arange(2)
    state = rule.init(Params(w=zero, consensus=zero, known=zero), 2)
    for values, w in (([2.0, 4.0], 3.5), ([10.0, 6.0], 7.0)):
        column = tensor(values)[:, None]
        uploads = Payload(Params(w=column, consensus=column, known=torch.ones_like(column)))
        state = rule.aggregate(state, ids, rule.broadcast(state, ids).payload, uploads, torch.tensor([4, 12]))
        assert {k: v.item() for k, v in state["w"].items()} == {"w": w, "consensus": 3.5, "known": 1.0}


@pytest.mark.parametrize("kind", ["numbers", "several labels"])
def test_it_needs_no_classes(kind: str):
    torch.manual_seed(0)
    clients, model = [], nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1 if kind == "numbers" else 3))
    for _ in range(3):
        x = torch.randn(30, 4)
        clients.append((x, x[:, 0] if kind == "numbers" else (x[:, :3] > 0).float()))
    federation = fedattune.federation_from(clients)
    runs = {
        rounds: fedattune.fit(federation, "feddbe", model, rounds=rounds, steps=5, batch_size=8, lr=0.1)
        for rounds in (1, 10)
    }
    losses = [run.metrics["loss_uniform"] for run in runs.values()]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("mu", [0, 1.5])
def test_a_momentum_that_makes_no_sense_is_refused(mu: float):
    with pytest.raises(ConfigError, match="mu"):
        build("feddbe", ALGORITHMS["feddbe"], {"mu": mu})
