"""Rounds with nodes that are offline, lose their disk, or diverge."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from fedattune import Federation, RunError, Settings
from fedattune.training.sampling import sample_cohort
from federations import make_federation
from flower.in_process import InProcessGrid
from flower.runs import find_models, read_log, run_deployed, run_simulated
from flower.spoiling import SPOILT
from remote_runs import same_numbers


@pytest.mark.parametrize("name", ["fedmcsa", "fedrep"])
def test_a_node_that_was_offline_comes_back(name: str, ragged: Federation, tmp_path: Path) -> None:
    """It misses rounds 2 and 3; what it trained before is still there, and it takes part in round 4."""

    class Away(InProcessGrid):
        def get_node_ids(self) -> Any:
            away = any((tmp_path / "run").rglob("000001.safetensors")) and not any(
                (tmp_path / "run").rglob("000003.safetensors")
            )
            return [node for node in super().get_node_ids() if not (away and node == SPOILT)]

    (result,) = run_deployed(ragged, tmp_path, algorithms=name, make_grid=Away, cohort=1.0, rounds=4)
    found = result.store.faults()
    assert [(r, client) for r, client, _ in found] == [(r, client) for r in (2, 3) for client in (1, 2, 4)]
    assert all(why == "node 'node-1' was offline" for _, _, why in found)
    assert result.rounds == 4
    rounds = {file.stem for file in (tmp_path / "state-1").rglob(f"{name}/seed-0/rounds/*.safetensors")}
    assert rounds == {"000001", "000004"}
    assert [entry["absent"] for entry in result.history] == [[], ["1", "2", "4"], ["1", "2", "4"], []]
    assert len(result.clients) == 6
    assert all(client.trained is not None for client in result.clients)


def test_a_node_whose_key_was_removed_is_not_called_offline(ragged: Federation, tmp_path: Path) -> None:
    class Removing(InProcessGrid):
        def get_node_ids(self) -> Any:
            begun = any((tmp_path / "run").rglob("000001.safetensors"))
            return [node for node in super().get_node_ids() if not (begun and node in (100, SPOILT))]

    asked = []

    def list_removed() -> frozenset[int]:
        asked.append(len(asked))
        return frozenset({SPOILT})

    (result,) = run_deployed(
        ragged, tmp_path, algorithms="fedavg", make_grid=Removing, rounds=3, cohort=1.0, list_removed=list_removed
    )
    reasons = {client: why for _, client, why in result.store.faults()}
    offline, removed = "node 'node-0' was offline", "node 'node-1' was removed"
    assert reasons == dict.fromkeys((0, 3), offline) | dict.fromkeys((1, 2, 4), removed)
    assert f"round 3: {removed}" in read_log(tmp_path)
    assert asked == [0]  # every few seconds at most


@pytest.mark.parametrize(("name", "missed"), [("fedmcsa", 1), ("fedrep", 0)])
def test_a_node_that_lost_its_disk_starts_again(name: str, missed: int, ragged: Federation, tmp_path: Path) -> None:
    """It is named; where it was taken to hold what it was sent, it misses a round, and is sent that again."""

    class Wiped(InProcessGrid):
        wiped = False

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            if '"kind": "train", "round": 4' in str([m.content["head"]["json"] for m in messages]):
                if not Wiped.wiped:
                    shutil.rmtree(tmp_path / "state-1")
                Wiped.wiped = True
            return super().push_messages(messages)

    # Round 3 asks none of the node's clients, so nothing waits for them when all train in round 4.
    config = {"rounds": 5, "eval_every": 5, "train": "all", "cohort": 2, "seed": 6}
    asked = [set(sample_cohort(Settings(**config), 6, r).tolist()) for r in (2, 3, 4)]
    assert [bool({1, 2, 4} & some) for some in asked] == [True, False, True]
    (result,) = run_deployed(ragged, tmp_path, algorithms=name, make_grid=Wiped, **config)
    assert Wiped.wiped
    lost = {r for r, _, why in result.store.faults() if "LostStateError" in why}
    assert len(lost) == missed
    assert result.rounds == 5
    sentence = "node 'node-1' had lost its state, and its clients started anew"
    assert len([note for note in result.notes if sentence in note]) == 1


def test_a_damaged_memory_is_passed_over(
    ragged: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state of the round before takes its place, and the node says so."""

    class Damaged(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            if '"kind": "train", "round": 4' in str([m.content["head"]["json"] for m in messages]):
                (file,) = (tmp_path / "state-1").rglob("000003.safetensors")
                file.write_bytes(file.read_bytes()[:-8])
            return super().push_messages(messages)

    (result,) = run_deployed(ragged, tmp_path, algorithms="fedrep", make_grid=Damaged, cohort=1.0, rounds=4)
    assert result.rounds == 4
    assert not result.store.faults()
    assert "000003.safetensors is damaged" in capsys.readouterr().out
    assert any((tmp_path / "state-1").rglob("000003.damaged"))


def test_many_clients_of_a_node_travel_in_one_message(tmp_path: Path) -> None:
    """A hundred clients at five nodes: as many messages as for five clients, and the simulator's numbers."""
    federation = make_federation([24 + i % 7 for i in range(100)])
    sent: list[str] = []

    def count(_: int, message: Message) -> bool:
        sent.append(message.metadata.message_type)
        return False

    groups = [list(range(i, 100, 5)) for i in range(5)]
    (result,) = run_deployed(federation, tmp_path, algorithms="fedmcsa", lost=count, groups=groups, cohort=40)
    same_numbers(run_simulated("fedmcsa", federation, cohort=40), result, measured=False)
    # Evaluations come with the next training, but for the last.
    assert (sent.count("query"), sent.count("train"), sent.count("evaluate")) == (5, 15, 5)
    assert len(find_models(tmp_path, "fedmcsa")) == 100


def test_diverged_clients_are_dropped_by_their_own_nodes(ragged: Federation, tmp_path: Path) -> None:
    """All diverge: the method is left, and this is said; another one of the run goes on."""
    with pytest.raises(RunError, match="no method finished"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", lr=1e38, accept="always", screening="off")
    assert any("training diverged on every client" in sentence for sentence in read_log(tmp_path))
