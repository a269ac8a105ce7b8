"""LG-FedAvg: what is shared and what stays, and its average of heads, worked out by hand."""

from typing import Any

import pytest
import torch
from torch import nn

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms import ALGORITHMS
from fedattune.core.selectors import AllBut, BatchNorms, Head

RUN: dict[str, Any] = {"rounds": 1, "cohort": 1.0, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64"}


def fit(federation: Federation, name: str, **options: Any) -> Result:
    return fedattune.fit(federation, name, "dnn", options=options, model_options={"hidden": 4}, **RUN)


def test_the_base_is_all_that_is_not_the_head() -> None:
    """Of linear, norm, linear, linear, the head has the last one or two; without a linear layer, all is base."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    first = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert AllBut(Head()).names(model) == (*first, "3.weight", "3.bias")
    assert AllBut(Head(2)).names(model) == first
    assert AllBut(Head(module="0")).names(model) == ("1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias")
    assert AllBut(BatchNorms()).names(nn.BatchNorm1d(3)) == ()


def test_the_heads_average_by_samples_by_hand() -> None:
    """Heads 1, 4 and 7 of clients with 1, 1 and 2 samples: (1 + 4 + 14) / 4 = 4.75, or 4 if uniform."""
    for weighting, mean in (("samples", 4.75), ("uniform", 4.0)):
        rule = ALGORITHMS["lg_fedavg"](weighting=weighting).server
        ids = torch.arange(3)
        state = rule.init(Params(head=torch.zeros(1, dtype=torch.float64)), 3)
        uploads = Payload(Params(head=torch.tensor([[1.0], [4.0], [7.0]], dtype=torch.float64)))
        state = rule.aggregate(state, ids, rule.broadcast(state, ids).payload, uploads, torch.tensor([1, 1, 2]))
        assert state["w"]["head"].item() == mean
        # Each client's weights are 1/3 from its head alone, or by samples 1/4, 1/4, 1/2: distances 3/4, 3/4, 1/2.
        (effect,) = rule.measure_effects(state, rule.broadcast(state, ids).mixing)
        assert effect.value == pytest.approx(2 / 3)


def test_a_round_is_training_alone_and_then_one_head_for_all(ragged: Federation) -> None:
    """In the first round, bases are those of training alone; the head is the weighted mean of these runs' heads."""
    ours, alone = fit(ragged, "lg_fedavg"), fit(ragged, "local")
    n = torch.tensor([len(client.train) for client in ragged.clients], dtype=torch.float64)
    for name, w in ours.models.items():
        trained = alone.models[name]
        if name.startswith("3."):
            trained = torch.tensordot(n / n.sum(), trained, 1).expand_as(w)
        torch.testing.assert_close(w, trained, rtol=0, atol=1e-12)
    assert ours.bytes_up == ours.bytes_down == 8 * (4 * 3 + 3) * 6
