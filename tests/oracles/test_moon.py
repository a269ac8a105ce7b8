"""MOON's loss, its gradient, and the bodies that clients compare, worked out by hand."""

import copy
from math import exp, log
from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import Federation, Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.moon import MoonModule
from fedattune.core.losses import compute_loss
from fedattune.core.payload import RoundContext

RUN: dict[str, Any] = {"steps": 3, "batch_size": 16, "lr": 0.1, "dtype": "float64", "cohort": 1.0}


def make_module(mu: float) -> MoonModule:
    """Features (1, 0) of input 1; (0.6, 0.8) in the global body and (0, 2) in the previous one; logits 0."""
    body, head = nn.Linear(1, 2, bias=False).double(), nn.Linear(2, 2).double()
    module = MoonModule(body, head, mu, tau=0.5)
    values = {"body": (1.0, 0.0), "global_body": (0.6, 0.8), "previous_body": (0.0, 2.0)}
    with torch.no_grad():
        for name, z in values.items():
            module.get_submodule(name).weight.copy_(torch.tensor(z, dtype=torch.float64)[:, None])
        head.weight.zero_()
        head.bias.zero_()
    return module


BATCH = (torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


def test_loss_by_hand():
    """sim(z, z_glob) = 0.6 and sim(z, z_prev) = 0: the loss is log 2 + mu log(1 + exp(-1.2)), tau = 0.5."""
    for mu in (0.0, 2.0):
        module = make_module(mu)
        loss = module.objective(module(BATCH[0]), BATCH, compute_loss)
        assert loss.item() == pytest.approx(log(2) + mu * log(1 + exp(-1.2)), abs=1e-12)


def test_gradient_by_hand():
    """The slopes of the similarities at z = (1, 0) are (0.6, 0.8) - 0.6 z = (0, 0.8) and (0, 1).

    The gradient of l_con is -(1 - p)/tau times their difference (0, -0.2), with 1 - p = 1/(1 + exp(1.2)): it is
    (0, 0.4/(1 + exp(1.2))). The copies have none.
    """
    module = make_module(3.0)
    module.objective(module(BATCH[0]), BATCH, compute_loss).backward()
    expected = torch.tensor([[0.0], [3 * 0.4 / (1 + exp(1.2))]], dtype=torch.float64)
    torch.testing.assert_close(module.body.weight.grad, expected)
    assert module.global_body.weight.grad is None
    assert module.previous_body.weight.grad is None


def test_frozen_copies_drop_nothing_out():
    """Features of the trained body are dropped out in training; those of the copies, which have no gradient, are not.

    BatchNorm layers of the copies go on by the batch: running statistics are those of the trained body alone.
    """
    body = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    module = MoonModule(body, nn.Linear(2, 2), mu=1.0, tau=0.5)
    for mode in (True, False):
        module.train(mode)
        assert [layer.training for layer in module.body] == [mode] * 3
        for copied in (module.global_body, module.previous_body):
            assert [layer.training for layer in copied] == [mode, mode, False]


def test_padding_does_not_count():
    module = make_module(3.0)
    x, y = BATCH
    padded = (torch.cat([x, -x]), torch.cat([y, y]), torch.tensor([1.0, 0.0], dtype=torch.float64))
    one, two = (module.objective(module(batch[0]), batch, compute_loss) for batch in (BATCH, padded))
    torch.testing.assert_close(one, two)


def test_bodies_of_a_round_by_hand():
    """Body 1 arrives where 5 was the last one: a step of gradient 2 and rate 0.1 starts from 1 and ends at 0.8.

    The loss compares with 1 and 5, and in the next round with 0.8 as the previous one.
    """
    rule, one = ALGORITHMS["moon"]().client, torch.ones(1, dtype=torch.float64)
    names = ("body.a", "head.a", "global_body.a", "previous_body.a")
    sent = Payload(Params(zip(names, (one, 3 * one, 7 * one, 5 * one), strict=True)))
    context = RoundContext(0.1, one[0], one[0], 1)
    carry = rule.begin(sent, {}, torch.tensor(True), context)
    seen: list[dict[str, float]] = []

    def grad(w: Params, batch: Any, *, statistics: bool = True) -> Params:
        seen.append({k: float(v) for k, v in w.items()})
        return w.map(lambda a: 2 * torch.ones_like(a))

    carry = rule.step(carry, BATCH, grad, context)
    assert seen == [{"body.a": 1.0, "head.a": 3.0, "global_body.a": 1.0, "previous_body.a": 5.0}]
    upload, state = rule.finish(carry, sent, {}, context)
    assert state == {}
    assert [float(upload.params[k]) for k in ("body.a", "head.a", "previous_body.a")] == pytest.approx([0.8, 2.8, 0.8])


def test_without_the_loss_and_in_the_first_round_it_is_fedavg(ragged: Federation):
    """In the first round, the global and the previous body are the same, and the loss has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    for rounds, mu in ((3, 0.0), (1, 5.0), (2, 5.0)):
        moon, fedavg = (
            fedattune.fit(ragged, name, copy.deepcopy(model), options=options, rounds=rounds, **RUN)
            for name, options in (("moon", {"mu": mu}), ("fedavg", {}))
        )
        gap = (moon.models["head.weight"] - fedavg.models["2.weight"]).abs().max()
        assert (gap < 1e-12) == ((rounds, mu) != (2, 5.0))
