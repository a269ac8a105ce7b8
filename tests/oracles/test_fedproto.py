"""FedProto's distances, prototypes and predictions, worked out by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import Federation, Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedproto import PrototypeModule
from fedattune.algorithms.prototypes import READING, measure_distance
from fedattune.core.losses import compute_loss
from fedattune.core.payload import RoundContext

FEATURES = [[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]]
CLASSES = torch.tensor([0, 0, 2])


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_module(**options: Any) -> PrototypeModule:
    """Features are the inputs; classes 0 and 1 have the prototypes (2, -1) and (0, 3); logits are 0."""
    head = nn.Linear(2, 3).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    module = PrototypeModule(nn.Identity(), head, 1.0, "samples", options.get("predict", "prototypes"))
    with torch.no_grad():
        module.prototypes.copy_(tensor([[2.0, -1.0], [0.0, 3.0], [9.0, 9.0]]))
        module.known.copy_(tensor(options.get("known", [1.0, 1.0, 0.0])))
    return module


def test_distances_by_hand():
    """Two samples of class 0 differ from (2, -1) by (-1, 1) and (1, 5); class 2 has no prototype yet.

    Mean square over 3 x 2 values: (2 + 26) / 6. The mean of class 0 is (2, 2), at distance 3 from (2, -1).
    """
    module, one_hot = make_module(), torch.eye(3, dtype=torch.float64)[CLASSES]
    for kind, expected in (("samples", 28 / 6), ("classes", 3.0)):
        found = measure_distance(tensor(FEATURES), one_hot, module.prototypes, module.known, kind)
        assert found.item() == pytest.approx(expected, abs=1e-9)


def test_gradients_give_the_sums_of_features_by_hand():
    """Class 0 has (1, 0) + (3, 4) = (4, 4) from two samples, class 2 (0, 2) from one; prototypes have no gradient."""
    module = make_module()
    batch = (tensor(FEATURES), CLASSES)
    module.objective(module(batch[0]), batch, compute_loss).backward()
    torch.testing.assert_close(module.sums.grad, READING * tensor([[4.0, 4.0], [0.0, 0.0], [0.0, 2.0]]))
    torch.testing.assert_close(module.counts.grad, READING * tensor([2.0, 0.0, 1.0]))
    assert module.prototypes.grad is None


def test_predictions_by_hand():
    """(1, 0) is at squared distances 2 and 10 from the prototypes, so the second logit is 8 below the first.

    A class without a prototype is last, by 1. Before any prototype, the head predicts.
    """
    x = tensor([[1.0, 0.0]])
    logits = make_module().eval()(x)
    torch.testing.assert_close(logits - logits[:, :1], tensor([[0.0, -8.0, -9.0]]))
    for options in ({"known": [0.0, 0.0, 0.0]}, {"predict": "head"}):
        torch.testing.assert_close(make_module(**options).eval()(x), tensor([[0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (0.75, 0.25)), ("uniform", (1.0, 1.0))])
def test_upload_by_hand(weighting: str, shares: tuple[float, float]):
    """Two steps: class 0 has sums 2 and 4 of 1 and 2 samples, so C_0 = 2; class 1 has 5 from one; class 2 none."""
    rule = ALGORITHMS["fedproto"](weighting=weighting).client
    sent = Payload(
        Params({"prototypes": tensor([[7.0]] * 3), "known": tensor([1.0] * 3), "body.a": tensor([1.0]),
                "sums": tensor([[0.0]] * 3), "counts": tensor([0.0] * 3)})
    )  # fmt: skip
    one = tensor(1.0)
    context = RoundContext(0.1, 2 * one, one, 1)
    carry = rule.begin(sent, {}, torch.tensor(True), context)
    for sums, counts in (([2.0, 5.0, 0.0], [1.0, 1.0, 0.0]), ([4.0, 0.0, 0.0], [2.0, 0.0, 0.0])):
        g = {"sums": READING * tensor(sums)[:, None], "counts": READING * tensor(counts)}
        gradient = Params({**sent.params, **g, "body.a": tensor([2.0])})
        carry = rule.step(carry, (), lambda w, batch, g=gradient: g, context)
    upload, state = rule.finish(carry, sent, {}, context)
    torch.testing.assert_close(upload.params["known"], tensor([*shares, 0.0]))
    torch.testing.assert_close(upload.params["prototypes"][:, 0], tensor([2 * shares[0], 5 * shares[1], 0.0]))
    assert upload.params["body.a"].item() == pytest.approx(0.6)
    assert torch.equal(rule.trained_model(upload, state)["prototypes"], sent.params["prototypes"])


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 3.5), ("uniform", 3.0)])
def test_server_by_hand(weighting: str, expected: float):
    """Class 0: means 2 of 3 rows (of 4) and 4 of 9 (of 12): (3 * 2 + 9 * 4) / 12 = 3.5, or (2 + 4) / 2.

    Class 1 occurs at the first client alone, with mean 5. Class 2 occurs nowhere, and keeps its 8.
    """
    rule = ALGORITHMS["fedproto"](weighting=weighting).server
    start = Params(prototypes=tensor([[0.0], [0.0], [8.0]]), known=tensor([0.0, 0.0, 1.0]))
    state = rule.init(start, 2)
    shares = tensor([[0.75, 0.25, 0.0], [0.75, 0.0, 0.0]])
    if weighting == "uniform":
        shares = (shares > 0).double()
    means = tensor([[2.0, 5.0, 0.0], [4.0, 0.0, 0.0]])
    uploads = Payload(Params(prototypes=(shares * means)[:, :, None], known=shares))
    ids = torch.arange(2)
    state = rule.aggregate(state, ids, rule.broadcast(state, ids).payload, uploads, torch.tensor([4, 12]))
    torch.testing.assert_close(state["w"]["prototypes"][:, 0], tensor([expected, 5.0, 8.0]))
    assert state["w"]["known"].tolist() == [1.0, 1.0, 1.0]


def test_without_the_distance_models_train_alone(ragged: Federation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    run = {"rounds": 3, "steps": 3, "batch_size": 16, "lr": 0.1, "dtype": "float64", "cohort": 1.0}
    local = fedattune.fit(ragged, "local", copy.deepcopy(model), **run)
    for lam in (0.0, 1.0):
        alone = fedattune.fit(ragged, "fedproto", copy.deepcopy(model), options={"lam": lam}, **run)
        assert torch.allclose(alone.models["head.weight"], local.models["2.weight"], rtol=0, atol=1e-12) == (lam == 0)
