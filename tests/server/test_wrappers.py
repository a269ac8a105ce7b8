"""Wrappers forward every ability of a rule; one that is added later would be lost without these tests."""

import pytest
import torch

from fedattune.algorithms import ALGORITHMS
from fedattune.client import SGD, ClientWrapper, find_row_weighing
from fedattune.core import algorithm
from fedattune.core.params import Params
from fedattune.server import Average
from fedattune.server.wrapper import ServerWrapper

CLIENT = ("ClientUpdate", "Probing", "Resting", "Substituting", "StepMeasuring")
SERVER = (
    "ServerUpdate", "SumsOnly", "Measurable", "Joinable", "Branching", "Storing", "Discardable", "Skippable",
    "Quarantining", "TrafficCounting", "Advisory",
)  # fmt: skip


@pytest.mark.parametrize(("wrapper", "kinds"), [(ClientWrapper, CLIENT), (ServerWrapper, SERVER)])
def test_a_wrapper_forwards_every_member(wrapper: type, kinds: tuple[str, ...]) -> None:
    members = [name for kind in kinds for name in vars(getattr(algorithm, kind)) if not name.startswith("_")]
    assert len(members) > 10
    assert [name for name in members if name not in vars(wrapper)] == []


def test_what_the_wrapped_rule_lacks_does_nothing() -> None:
    rule, ids = ServerWrapper(Average()), torch.tensor([0])
    state = rule.init(Params(w=torch.ones(2)), 3)
    assert rule.discard_uploads(state, ids) is rule.skip_round(state) is rule.quarantine(state, ids) is state
    assert not rule.can_quarantine
    assert rule.warnings(state, ids) == rule.measure_effects(state, None) == ()
    assert rule.add_clients(state, 2)["p"].shape == (5,)
    assert ClientWrapper(SGD()).mechanisms == ()
    assert find_row_weighing(ClientWrapper(SGD())) is None
    attune = ALGORITHMS["attune"]().client
    assert find_row_weighing(ClientWrapper(ClientWrapper(attune))) is attune


@pytest.mark.parametrize("name", ["pfedla", "heurpfedla"])
def test_a_wrapped_rule_can_quarantine(name: str) -> None:
    assert ServerWrapper(ServerWrapper(ALGORITHMS[name]().server)).can_quarantine
