"""Server rules that state which sums they need give the same state if they see the sums alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.feddbe import ConsensusAverage
from fedattune.algorithms.fedproto import PrototypeAverage
from fedattune.algorithms.igfl import GlobalUpdateWrapper, UpdateAttention
from fedattune.algorithms.scaffold import ControlVariateWrapper
from fedattune.core.algorithm import ServerUpdate, SumWeighting, find_needed_sums
from fedattune.core.options import build
from fedattune.core.params import Params
from fedattune.core.payload import Payload, ServerState
from fedattune.server import Average

N = torch.tensor([3, 10, 7, 40])
"""Training samples of the four clients that upload, of six."""

IDS = torch.tensor([0, 2, 3, 5])

SUMS = {
    name: sums
    for name, make in ALGORITHMS.items()
    if (sums := find_needed_sums(build(name, make, {}).server)) is not None
}


def draw(generator: torch.Generator, *shape: int, names: tuple[str, str] = ("0.weight", "0.bias")) -> Params:
    return Params(
        {
            names[0]: torch.randn(*shape, 2, 3, generator=generator, dtype=torch.float64),
            names[1]: torch.randn(*shape, 2, generator=generator, dtype=torch.float64),
        }
    )


def draw_steps(generator: torch.Generator) -> Params:
    """Draw the effective steps of four clients, with their inverses; all took the steps of their method."""
    a = 1 + torch.rand(4, generator=generator, dtype=torch.float64)
    return Params(a=a, inverse=1 / a, are_plain=torch.zeros_like(a))


def average(rows: Params, weighting: SumWeighting) -> Params:
    p = N.double() / N.sum() if weighting == "samples" else torch.full((len(N),), 1 / len(N)).double()
    return rows.map(lambda a: torch.tensordot(p, a, 1).expand(len(N), *a.shape[1:]))


def play(rule: ServerUpdate, extras: list[str], sums: Mapping[str, SumWeighting] | None) -> ServerState:
    """Aggregate three rounds; with sums, each upload is replaced by what the sum tells."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    draw_next = partial(draw, generator)
    if isinstance(rule, PrototypeAverage):
        draw_next = partial(draw, generator, names=("prototypes", "known"))
    if isinstance(rule, ConsensusAverage):
        draw_next = partial(draw, generator, names=("consensus", "known"))
    state = rule.init(draw_next(), 6)
    for _ in range(3):
        sent = rule.broadcast(state, IDS).payload
        extra = {key: draw_steps(generator) if key == "steps" else draw_next(4) for key in extras}
        uploads = Payload(draw_next(4), extra)
        if sums is not None:
            extra = {key: average(part, sums[key]) for key, part in uploads.extra.items()}
            uploads = Payload(average(uploads.params, sums["params"]), extra)
        state = rule.aggregate(state, IDS, sent, uploads, N)
    return state


def check(rule: ServerUpdate, sums: Mapping[str, SumWeighting]) -> None:
    extras = [key for key in sums if key != "params"]
    plain, summed = play(rule, extras, None), play(rule, extras, sums)
    assert plain.keys() == summed.keys()
    for key, value in plain.items():
        mine = value if isinstance(value, Params) else Params(value=value)
        other = summed[key]
        other = other if isinstance(other, Params) else Params(value=other)
        for name, tensor in mine.items():
            # Adam's step divides by numbers near 1e-3, so rounding grows to some 1e-13.
            torch.testing.assert_close(other[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_enough(name: str) -> None:
    check(build(name, ALGORITHMS[name], {}).server, SUMS[name])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedyogi", "scaffold", "igfl_c", "l2gd", "fedrod"])
def test_sums_are_enough_with_either_weighting(name: str, weighting: str) -> None:
    options: dict[str, Any] = {"weighting": weighting} | ({"p": 0.6} if name == "l2gd" else {})
    rule = build(name, ALGORITHMS[name], options).server
    sums = find_needed_sums(rule)
    assert sums is not None
    assert sums["params"] == weighting
    check(rule, sums)


def test_the_other_weighting_is_not_enough() -> None:
    with pytest.raises(AssertionError):
        check(Average("samples"), {"params": "uniform"})


def test_the_methods_whose_server_only_averages() -> None:
    assert sorted(SUMS) == [
        "apfl", "ditto", "fedadagrad", "fedadam", "fedala", "fedam", "fedavg", "fedavg_ft", "fedavgm", "fedbabu",
        "fedbn", "fedcp", "feddbe", "feddyn", "fedlc", "fedmcsa_no_mcsa", "fednova", "fedper", "fedproto", "fedprox",
        "fedrep", "fedrod", "fedyogi", "igfl_c", "knn_per", "l2gd", "lg_fedavg", "local", "moon", "perfedavg", "pfedme",
        "scaffold", "vrl_sgd",
    ]  # fmt: skip


@dataclass(frozen=True)
class Median(Average):
    """A subclass with arithmetic of its own, which states nothing."""

    def aggregate(self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> ServerState:
        return {**state, "w": uploads.params.map(lambda a: a.median(0).values)}


def test_what_a_base_class_states_does_not_count_for_other_arithmetic() -> None:
    assert find_needed_sums(Average()) == {"params": "samples"}
    assert find_needed_sums(Median()) is None
    assert find_needed_sums(ControlVariateWrapper(Median())) is None
    assert find_needed_sums(GlobalUpdateWrapper(UpdateAttention())) is None
