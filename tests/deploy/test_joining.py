"""A node that comes during a run joins it: its clients get the server's models, and the others keep theirs."""

import gc
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

import fedattune
from fedattune import Federation, Result
from flower.in_process import InProcessGrid
from flower.runs import find_models, read_log, run_deployed

NEW = 102
"""Flower's number of the node that comes later, with client 5."""


class LateNode(InProcessGrid):
    """A grid in which the last node comes when the first node was asked `after` times."""

    after = 3

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are online."""
        return [node for node in self.contexts if node != NEW or self.n_asked >= self.after]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count the messages to the first node."""
        messages = list(messages)
        self.n_asked += sum(message.metadata.dst_node_id == 100 for message in messages)
        return super().push_messages(messages)

    n_asked = 0


def run(federation: Federation, folder: Path, **config: Any) -> list[Result]:
    return run_deployed(federation, folder, **{"make_grid": LateNode, "nodes": 2, "rounds": 6} | config)


# What a server keeps of its clients: nothing, a matrix, control variates, models of groups, one network, experts.
@pytest.mark.parametrize("name", ["local", "fedmcsa", "scaffold", "ifca", "pfedhn", "attune"])
def test_a_node_joins_a_run(name: str, ragged: Federation, tmp_path: Path) -> None:
    (result,) = run(ragged, tmp_path, algorithms=name)
    assert result.is_finished
    assert [one.id for one in result.clients] == list("012345")
    assert all(one.trained is not None and one.received is not None for one in result.clients)
    assert not result.store.faults()
    rounds = {point: r for r, point, scores in result.store.scores("test") if scores.shape[1] == 6}
    assert rounds["trained"] == 6
    assert any(scores.shape[1] == 5 for _, _, scores in result.store.scores("test"))
    assert any("1 of the 6 clients joined after round" in note for note in result.notes)
    assert not any("lost its state" in line for line in read_log(tmp_path))
    assert sorted(find_models(tmp_path, name)) == list("012345")


def test_a_newcomer_gets_the_global_model_and_the_others_keep_it(ragged: Federation, tmp_path: Path) -> None:
    """The evaluation after the last round without the newcomer already asks it."""
    plan = {"algorithms": "fedavg", "accept": "always"}  # else a client may predict with its own model
    (joined,) = run(ragged, tmp_path / "joined", **plan)
    (others,) = run(ragged, tmp_path / "others", **plan, groups=([0, 3], [1, 2, 4]))
    everybody = {r: s for r, point, s in joined.store.scores("test") if point == "global" and s.shape[1] == 6}
    alone = {r: s for r, point, s in others.store.scores("test") if point == "global"}
    first = min(everybody)
    assert first < 6
    assert everybody[first][:, :5] == pytest.approx(alone[first])
    received = {r: s for r, point, s in joined.store.scores("test") if point == "received"}
    assert received[first] == pytest.approx(everybody[first])


@pytest.mark.parametrize(
    ("name", "after"),
    # The moment decides who is asked again, the method what the server keeps.
    [("fedmcsa", 8), ("pfedla", 14)],
)
def test_a_server_that_is_killed_around_the_joining_goes_on(
    name: str, after: int, ragged: Federation, tmp_path: Path
) -> None:
    class Killed(BaseException):
        """The server's process ends."""

    count = itertools.count()

    def dies(*_: Any) -> bool:
        if next(count) == after:
            raise Killed
        return False

    with pytest.raises(Killed):
        run(ragged, tmp_path, algorithms=name, lost=dies)
    gc.collect()
    (result,) = run(ragged, tmp_path, algorithms=name, make_grid=InProcessGrid)
    assert result.is_finished
    assert [one.id for one in result.clients] == list("012345")
    assert not result.store.faults()


def test_a_comparison_takes_no_newcomers(ragged: Federation, tmp_path: Path) -> None:
    results = run(ragged, tmp_path, algorithms="local,fedavg")
    assert [len(result.clients) for result in results] == [5, 5]
    (line,) = [line for line in read_log(tmp_path) if "this run compares methods" in line]
    assert line.startswith("node 'node-2' does not belong to this federation; it takes part from the next run on")


# What of the server's state depends on the number of clients beyond one row for each.
@pytest.mark.parametrize("name", ["pfedhn", "fedpac", "attune", "igfl_s"])
def test_clients_join_the_folder_of_a_run_that_was_joined(name: str, ragged: Federation, tmp_path: Path) -> None:
    """The run started with two clients."""
    more = {"set": "igfl_s.attention=self"} if name == "igfl_s" else {}
    (result,) = run(ragged, tmp_path, algorithms=name, groups=([0], [1], [2, 3, 4, 5]), rounds=4, cohort=1.0, **more)
    assert any("4 of the 6 clients joined after round" in note for note in result.notes)
    saved = Result.load(tmp_path / "run" / name / "seed-0")
    assert len(fedattune.personalize(saved, ragged, rounds=1).newcomers) == 6
