"""FedBABU: the frozen head in training, and the two ways of fine-tuning, worked out by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms import ALGORITHMS
from fedattune.core.optimizers import Adam, GradientDescent, Optimizer
from fedattune.core.payload import RoundContext
from oracles.quadratic import FRESH


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("optimizer", "body"),
    [(GradientDescent(), 3.62), (GradientDescent(momentum=0.5), 3.52), (Adam(weight_decay=0.5), None)],
)
def test_the_body_moves_and_the_head_does_not(optimizer: Optimizer, body: float | None) -> None:
    """Two steps of rate 0.1 on 1/2 (w - m)^2 for both parts, with body 4 and m = 2, head -1 and m = 5.

    The body's error is 2, then 1.8, then 1.62: body 3.62. With momentum 0.5 the second step is 0.1 (0.5 * 2 + 1.8) =
    0.28: body 3.8 - 0.28 = 3.52. The head stays -1 to the bit, also under the decoupled weight decay of AdamW.
    """
    target = Params(body=one(2), head=one(5))
    rule = ALGORITHMS["fedbabu"]().client.with_optimizer(optimizer)  # type: ignore[attr-defined]
    sent = Payload(Params(body=one(4), head=one(-1)))
    context = RoundContext(0.1, one(2)[0], one(1)[0], 1, ("head",))
    carry = rule.begin(sent, rule.init_local_state(sent.params), FRESH, context)
    for _ in range(2):
        carry = rule.step(carry, (), lambda w, _: w - target, context)
    upload, _ = rule.finish(carry, sent, {}, context)
    assert upload.params["head"].item() == -1
    assert upload.params["body"].item() != 4
    if body is not None:
        assert upload.params["body"].item() == pytest.approx(body)


def fit(federation: Federation, **options: Any) -> Result:
    """A run whose batches hold all rows of a client, so that a pass over the data is one step."""
    settings = {"rounds": 2, "cohort": 3, "epochs": 1, "batch_size": 1000, "lr": 0.5, "dtype": "float64"}
    return fedattune.fit(federation, "fedbabu", "dnn", options=options, model_options={"hidden": 4}, **settings)


TINY = 1e-300
"""A rate of fine-tuning that changes nothing."""


def test_training_leaves_the_initial_head_and_sends_the_body_alone(ragged: Federation) -> None:
    """The head of all clients, sampled or not, is the first one; 5 x 4 + 4 values of the body travel."""
    trained, start = fit(ragged, ft_lr=TINY), fit(ragged, ft_lr=TINY, weighting="uniform")
    for name, w in trained.models.items():
        assert torch.equal(w, w[:1].expand_as(w))  # one body and one head for all
        is_head = name.startswith("3.")
        assert torch.equal(w, start.models[name]) == is_head  # what two ways of training leave alike
    assert trained.bytes_up == trained.bytes_down == 8 * 24 * 3 * 2


def test_fine_tuning_is_gradient_descent_on_the_head_or_on_all(ragged: Federation) -> None:
    """One step of rate 0.3, or a tenth of 0.5, on all training rows of a client, from the common model, by autograd."""
    common = fit(ragged, ft_lr=TINY).model(1)
    index = torch.as_tensor(ragged.clients[1].train)
    cross_entropy(common(ragged.features(index, torch.float64)), ragged.y[index]).backward()
    for tuned, rate, given in (("head", 0.3, {"ft_lr": 0.3}), ("all", 0.3, {"ft_lr": 0.3}), ("head", 0.05, {})):
        mine = dict(fit(ragged, tuned=tuned, **given).model(1).named_parameters())
        for name, w in common.named_parameters():
            assert w.grad is not None
            moves = tuned == "all" or name.startswith("3.")
            torch.testing.assert_close(mine[name].data, w.data - (rate * w.grad if moves else 0), rtol=0, atol=1e-12)
