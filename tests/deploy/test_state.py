"""The state of a node between messages."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")


from fedattune import Params
from fedattune.deploy.node.files import NodeState, StaleMessageError


def test_a_message_that_comes_late_is_not_worked_off(tmp_path: Path) -> None:
    node = NodeState(tmp_path)
    with node.lock([1, 4]):
        node.save(2, {"fresh": torch.ones(2)})
    with pytest.raises(StaleMessageError), node.lock([1, 3]):
        raise AssertionError
    with node.lock([2, 1]):  # the server was started again
        assert node.load([2, 2], Params())[1] == 2


def test_each_client_goes_back_to_its_own_round(tmp_path: Path) -> None:
    node = NodeState(tmp_path)
    node.save(1, {"w": torch.tensor([1.0, 1.0, 1.0])})
    node.save(2, {"w": torch.tensor([2.0, 2.0, 2.0])})
    node.save(3, {"w": torch.tensor([3.0, 3.0, 3.0])})
    start = Params(w=torch.zeros(3))
    state, last = node.load([2, 1, 0], start)
    assert state is not None
    assert (state["w"].tolist(), last) == ([2.0, 1.0, 0.0], 2)
    assert node.load([3, 3, 3], start)[1] == 2  # that of round 3 was forgotten


def test_a_round_that_the_server_still_names_stays(tmp_path: Path) -> None:
    """The server refuses the uploads of the first client for long, so it continues from an old round."""
    node, start = NodeState(tmp_path), Params(w=torch.zeros(2))
    for r in range(1, 9):
        state, _ = node.load([min(r - 1, 2), r - 1], start)
        assert r == 1 or (state is not None and state["w"].tolist() == [min(r - 1, 2), r - 1])
        node.save(r, {"w": torch.full((2,), float(r))})
    assert sorted(file.stem for file in (tmp_path / "rounds").glob("*.safetensors")) == [
        "000002",
        "000006",
        "000007",
        "000008",
    ]
