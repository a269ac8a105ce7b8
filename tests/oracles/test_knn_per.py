"""kNN-Per's vote, its mixture and its memory, worked out by hand."""

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedattune
from fedattune import Federation, Params, Payload
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.knn_per import LABELS, ROWS, MemoryModule, MemoryNetwork
from fedattune.core.payload import RoundContext


def module(k: int, lam: float, rows: list[float], classes: list[int]) -> MemoryModule:
    """The global model says 1/2 and 1/2; its features are the input, one number."""
    model = nn.Linear(1, 2).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    made = MemoryNetwork(k, lam, memory=4).wrap(model, torch.zeros(2, 1).double())
    assert isinstance(made, MemoryModule)
    with torch.no_grad():
        for place, (row, label) in enumerate(zip(rows, classes, strict=True)):
            made.memory["rows"][place] = row
            made.memory["labels"][place, label] = 1
    return made.eval()


@pytest.mark.parametrize(("k", "vote"), [(1, 1.0), (2, 2 / 3), (3, 4 / 7), (10, 4 / 7)])
def test_vote_and_mixture_by_hand(k: int, vote: float) -> None:
    """Distances 0, log 2 and log 4 from x = 0 weigh 1, 1/2 and 1/4; only the nearest row has class 0.

    Its share is 1 of 1, 1 of 3/2, or 1 of 7/4; the empty fourth place has no vote. With lam = 0.6, class 0 has
    0.6 share + 0.4 / 2.
    """
    made = module(k, 0.6, [log(4), 0.0, log(2)], [1, 0, 1])
    with torch.no_grad():
        probabilities = made(torch.zeros(1, 1).double()).exp()[0].tolist()
    assert probabilities == pytest.approx([0.6 * vote + 0.2, 0.8 - 0.6 * vote])


def test_distances_are_those_of_features() -> None:
    """Features 2 x double all distances: x = 0 and rows 0 and log 2 weigh 1 and exp(-2 log 2) = 1/4, so 4/5 to 1/5."""
    made = module(10, 1.0, [0.0, log(2)], [0, 1])
    made.body = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(made.body.weight, 2.0)
    with torch.no_grad():
        assert made.eval()(torch.zeros(1, 1).double()).exp()[0].tolist() == pytest.approx([4 / 5, 1 / 5])


def test_without_rows_the_global_model_predicts() -> None:
    made = module(10, 1.0, [], [])
    nn.init.constant_(made.head.bias, 1.0)
    with torch.no_grad():
        made.head.bias[1] += 1
        odds = made(torch.zeros(1, 1).double())[0].diff().exp().item()
        (effect,) = made.measure_effects(torch.zeros(1, 1).double())
    assert odds == pytest.approx(exp(1))
    assert effect.value == pytest.approx(0, abs=1e-12)


def test_the_memory_takes_rows_in_order_and_drops_padding() -> None:
    """Four places: the rows 1 and 2 of a padded batch, then 3 and 4; row 5 finds no place."""
    rule: Any = ALGORITHMS["knn_per"]().client
    one = torch.ones((), dtype=torch.float64)
    memory = {ROWS: torch.full((4, 1), 9.0).double(), LABELS: torch.ones(4, 2).double()}
    sent, context = Payload(Params(w=one, **memory)), RoundContext(0.1, one, one, 1)

    def batch(*values: float) -> tuple[Tensor, Tensor]:
        x = torch.tensor(values, dtype=torch.float64)
        return x[:, None], (x.long() + 1) % 2

    carry = rule.begin(sent, {}, torch.tensor(True), context)
    carry = rule.probe(carry, (*batch(1, 2, 7), torch.tensor([1.0, 1.0, 0.0]).double()), None, None, context)
    carry = rule.probe(carry, batch(3, 4, 5), None, None, context)
    upload, _ = rule.finish(carry, sent, {}, context)
    assert upload.params[ROWS].flatten().tolist() == [1, 2, 3, 4]
    assert upload.params[LABELS].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]


def test_a_client_keeps_its_training_rows_and_trains_as_in_fedavg(ragged: Federation) -> None:
    run: dict[str, Any] = {"rounds": 3, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "dtype": "float64"}
    result, fedavg = (fedattune.fit(ragged, name, "mlr", **run) for name in ("knn_per", "fedavg"))
    for ours, theirs in zip(("head.weight", "head.bias"), fedavg.models.values(), strict=True):
        assert torch.equal(result.models[ours], theirs)
    for number, rows in enumerate(ragged.part("train")):
        index = torch.as_tensor(rows)
        kept = result.models[LABELS][number].sum(1) > 0
        assert int(kept.sum()) == min(100, len(rows))
        want = {tuple(x.tolist()) for x in ragged.features(index, torch.float64)}
        assert {tuple(x.tolist()) for x in result.models[ROWS][number][kept]} <= want
