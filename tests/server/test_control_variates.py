"""SCAFFOLD's server with kept control variates: those of rejected clients leave the mean."""

import torch

from fedattune.algorithms.scaffold import ControlVariateWrapper
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.server import Average

RULE = ControlVariateWrapper(Average("uniform"))


def send(rule: ControlVariateWrapper, state: object, ids: list[int], dc: list[float]) -> object:
    clients = torch.tensor(ids)
    w = Params(w=torch.zeros(len(ids), 1))
    uploads = Payload(w, {"dc": Params(w=torch.tensor(dc)[:, None])})
    return rule.aggregate(state, clients, Payload(w), uploads, torch.ones(len(ids), dtype=torch.int64))  # type: ignore[arg-type]


def test_rejected_clients_leave_the_mean_and_come_back() -> None:
    """By hand, of four clients: c = (1 + 2 + 3 + 10) / 4, then without the last, then with its 10 + 1."""
    rule = RULE.prepare_discards()
    state = rule.init(Params(w=torch.zeros(1)), 4)
    state = {**state, "own": state["own"].map(torch.clone)}
    state = send(rule, state, [0, 1, 2, 3], [1.0, 2.0, 3.0, 10.0])
    assert state["c"]["w"].item() == 4.0
    for _ in range(2):  # a second rejection takes nothing more
        state = rule.discard_uploads(state, torch.tensor([3]))
        assert state["c"]["w"].item() == 1.5
    state = send(rule, state, [0], [1.0])
    assert state["c"]["w"].item() == 1.75
    state = send(rule, state, [3], [1.0])
    assert state["c"]["w"].item() == 4.5
    assert rule.traits.per_client == (*RULE.traits.per_client, "own", "counts")


def test_newcomers_have_room() -> None:
    rule = RULE.prepare_discards()
    state = rule.add_clients(rule.init(Params(w=torch.zeros(1)), 2), 3)
    assert (len(state["own"]["w"]), state["counts"].tolist()) == (5, [1.0] * 5)


def test_clients_that_join_count_in_the_mean() -> None:
    """By hand: c = (1 + 3) / 2, then (1 + 3 + 0 + 0) / 4, and (1 + 3 + 8 + 0) / 4 after the third client's upload."""
    for rule in (RULE, RULE.prepare_discards()):
        state = send(rule, rule.init(Params(w=torch.zeros(1)), 2), [0, 1], [1.0, 3.0])
        assert state["c"]["w"].item() == 2.0
        state = rule.add_clients(state, 2)
        assert state["c"]["w"].item() == 1.0
        assert send(rule, state, [2], [8.0])["c"]["w"].item() == 3.0


def test_without_a_defence_nothing_is_kept() -> None:
    state = RULE.init(Params(w=torch.zeros(1)), 4)
    assert not {"own", "counts"} & state.keys()
    state = send(RULE, state, [3], [8.0])
    assert RULE.discard_uploads(state, torch.tensor([3]))["c"]["w"].item() == 2.0
