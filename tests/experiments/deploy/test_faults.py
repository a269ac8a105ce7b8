"""What becomes of a round when nodes fail, send nonsense, or forget; without a network."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from filelock import FileLock
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from safetensors.torch import load_file

from fedattune import ConfigError, DataError, Federation, Params, Result, RunError, Settings
from fedattune.data import export_clients, infer_schema
from fedattune.experiments.deploy.grid import pack_record, unpack_record
from fedattune.experiments.deploy.state import NodeState, StaleMessageError
from fedattune.training.backends.message import WorkerMessage
from fedattune.training.sampling import sample_cohort
from federations import make_federation
from flower.in_process import InProcessGrid
from flower.runs import GROUPS, find_models, read_log, run_deployed, run_simulated
from remote_runs import same_numbers

Spoil = Callable[[WorkerMessage], WorkerMessage | None]
SPOILT, ROUND = 101, 2  # the node with clients 1, 2 and 4, in its second round


def spoiling(spoil: Callable[[Message], Message | None]) -> type[InProcessGrid]:
    """A grid in which what one node answers in one round is changed on its way."""

    class Spoiling(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            kept = []
            for reply in super().pull_messages(message_ids):
                head = "" if reply.has_error() else str(reply.content["head"]["json"])
                mine = reply.metadata.src_node_id == SPOILT and '"kind": "trained"' in head
                if mine and f'"round": {ROUND}' in head:
                    reply = spoil(reply)
                if reply is not None:
                    kept.append(reply)
            return kept

    return Spoiling


def changed(change: Callable[[WorkerMessage], None]) -> Callable[[Message], Message]:
    def spoil(reply: Message) -> Message:
        parcel = unpack_record(reply.content)
        change(parcel)
        reply.content = pack_record(parcel)
        return reply

    return spoil


def first(parcel: WorkerMessage) -> str:
    return next(name for name in parcel.tensors if name.startswith("upload/params/"))


def whole(new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[WorkerMessage], None]:
    """Change one tensor of the upload."""

    def change(parcel: WorkerMessage) -> None:
        parcel.tensors[first(parcel)] = new(parcel.tensors[first(parcel)])

    return change


def head(**values: Any) -> Callable[[WorkerMessage], None]:
    return lambda parcel: parcel.head.update(values)


def move(parcel: WorkerMessage) -> None:
    parcel.tensors["upload/params/secret"] = parcel.tensors[first(parcel)]


def garbage(reply: Message) -> Message:
    reply.content = RecordDict({"head": ConfigRecord({"version": 1, "json": "{"})})
    return reply


def other_format(reply: Message) -> Message:
    reply.content["head"]["version"] = 99
    return reply


def error(reply: Message) -> Message:
    return Message(Error(2, "patient 17 is ill"), metadata=reply.metadata)


def scores(parcel: WorkerMessage) -> None:
    name = next(name for name in parcel.tensors if name.endswith("/correct"))
    parcel.tensors[name] = parcel.tensors[name] + 1000


def other_point(parcel: WorkerMessage) -> None:
    parcel.head["scores"][0][0] = "received"


def zipped(reply: Message) -> Message:
    """Bytes that NumPy takes for an archive."""
    arrays = reply.content.array_records["arrays"]
    name = next(iter(arrays))
    arrays[name] = Array(
        arrays[name].dtype, arrays[name].shape, arrays[name].stype, b"PK\x03\x04" + b"0" * 40
    )
    return reply


def deep(reply: Message) -> Message:
    reply.content["head"]["json"] = "[" * 100_000
    return reply


FAULTS: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "nan": (changed(whole(lambda v: v * float("nan"))), "uploaded values that are not finite"),
    "infinite": (changed(whole(lambda v: v / 0)), "uploaded values that are not finite"),
    "huge": (changed(whole(lambda v: v * 1e9)), "more than 100 times longer than usual"),
    "shape": (changed(whole(lambda v: v[:, :1])), "expected float64 of shape (3, 6, 5)"),
    "rows": (changed(whole(lambda v: v[:1])), "expected float64 of shape"),
    "type": (changed(whole(lambda v: v.float())), "is float32 of shape"),
    "name": (changed(move), "that only one side has: 'secret'"),
    "stale": (changed(head(round=1)), "replied for round 1, not 2"),
    "other run": (changed(head(token="0" * 16)), "replied for token"),
    "clients": (changed(head(ids=[0, 1, 2])), "uploads for clients that were not asked"),
    "steps": (changed(head(steps=-1)), "reports steps=-1"),
    "more steps": (changed(head(steps=2**70)), "reports steps=1180591620717411303424"),
    "fractions": (changed(head(diverged=[1.0])), "sent no valid list of clients"),
    "point": (changed(other_point), "sends scores of an unknown part"),
    "archive": (zipped, "sent no valid reply: its message is damaged"),
    "deep": (deep, "sent no valid reply: its message is damaged"),
    "nothing": (changed(head(ids=None)), "sent no valid list of clients"),
    "scores": (changed(scores), "sends impossible scores"),
    "garbage": (garbage, "sent no valid reply: its message is damaged"),
    "format": (other_format, "its message has version 99 of the format, expected 1"),
    "error": (error, "failed (Flower's error code 2)"),
}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Federation], tuple[Result, Path]]:
    """A run in which the node's answer does not arrive at all, by method."""
    made: dict[str, tuple[Result, Path]] = {}

    def run(name: str, federation: Federation) -> tuple[Result, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            (result,) = run_deployed(
                federation, folder, algorithms=name, make_grid=spoiling(lambda _: None), cohort=1.0
            )
            made[name] = result, folder
        return made[name]

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_is_dropped_and_named(fault: str, ragged: Federation, tmp_path: Path, lost: Any) -> None:
    """It changes nothing but what would miss without it: all other clients' models are as if it had not come."""
    spoil, reason = FAULTS[fault]
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedmcsa", make_grid=spoiling(spoil), cohort=1.0)
    found = result.store.faults()
    assert [(r, client) for r, client, _ in found] == [(2, 1), (2, 2), (2, 4)]
    assert all(reason in why for _, _, why in found)
    assert any(reason in sentence and "round 2" in sentence for sentence in read_log(tmp_path))
    assert any(reason in note and "1, 2, 4" in note for note in result.notes)
    assert "patient" not in (tmp_path / "log.txt").read_text() + str(result.notes)
    assert result.history[1]["absent"] == ["1", "2", "4"]
    assert result.rounds == 4
    expected, folder = lost("fedmcsa", ragged)
    for client, file in find_models(tmp_path, "fedmcsa").items():
        other = load_file(find_models(folder, "fedmcsa")[client])
        assert all(torch.equal(v, other[k]) for k, v in load_file(file).items())
    assert result.metrics == expected.metrics


def test_one_bad_client_of_a_node_is_dropped_alone(ragged: Federation, tmp_path: Path) -> None:
    def poison(parcel: WorkerMessage) -> None:
        parcel.tensors[first(parcel)][1] = float("nan")

    (result,) = run_deployed(
        ragged, tmp_path, algorithms="fedavg", make_grid=spoiling(changed(poison)), cohort=1.0
    )
    assert result.store.faults() == [(2, 2, "uploaded values that are not finite")]
    assert "round 2: client '2' uploaded values that are not finite; its upload is dropped" in read_log(
        tmp_path
    )


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "fedrep"])
def test_a_node_that_was_offline_comes_back(name: str, ragged: Federation, tmp_path: Path) -> None:
    """It misses rounds 2 and 3; what it trained before is still there, and it takes part in round 4."""

    class Away(InProcessGrid):
        def get_node_ids(self) -> Any:
            away = any((tmp_path / "run").rglob("000001.safetensors")) and not any(
                (tmp_path / "run").rglob("000003.safetensors")
            )
            return [node for node in super().get_node_ids() if not (away and node == SPOILT)]

    (result,) = run_deployed(ragged, tmp_path, algorithms=name, make_grid=Away, cohort=1.0)
    found = result.store.faults()
    assert [(r, client) for r, client, _ in found] == [(r, client) for r in (2, 3) for client in (1, 2, 4)]
    assert all(why == "node 'node-1' was offline" for _, _, why in found)
    assert result.rounds == 4
    rounds = {file.stem for file in (tmp_path / "state-1").rglob(f"{name}/seed-0/rounds/*.safetensors")}
    assert rounds == {"000001", "000004"}
    assert [entry["absent"] for entry in result.history] == [[], ["1", "2", "4"], ["1", "2", "4"], []]
    assert len(result.clients) == 6
    assert all(client.trained is not None for client in result.clients)


@pytest.mark.parametrize(("name", "missed"), [("fedmcsa", 1), ("fedrep", 0)])
def test_a_node_that_lost_its_disk_starts_again(
    name: str, missed: int, ragged: Federation, tmp_path: Path
) -> None:
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

    (result,) = run_deployed(ragged, tmp_path, algorithms="fedrep", make_grid=Damaged, cohort=1.0)
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
    same_numbers(run_simulated("fedmcsa", federation, cohort=40), result)
    assert (sent.count("query"), sent.count("train"), sent.count("evaluate")) == (5, 20, 20)
    assert len(find_models(tmp_path, "fedmcsa")) == 100


def test_diverged_clients_are_dropped_by_their_own_nodes(ragged: Federation, tmp_path: Path) -> None:
    """All diverge: the method is left, and this is said; another one of the run goes on."""
    with pytest.raises(RunError, match="no method finished"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", lr=1e38)
    assert any("training diverged on every client" in sentence for sentence in read_log(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rouns": 3}, "run configuration: unknown key 'rouns', did you mean 'rounds'"),
        ({"rounds": 0}, "run configuration: rounds: input should be greater than or equal to 1, got 0"),
        ({"algorithms": "fedmcsaa"}, "did you mean 'fedmcsa'"),
        ({"set": "fedavg.mu=1"}, "mu"),
        ({"engine": "loop"}, "unknown key 'engine'"),
        ({"cohort": 7}, "cohort: got 7 clients per round, expected at most the 6"),
        ({"nodes": 4, "start-timeout": 0.01}, "waiting for 4 nodes: got 3 online after 0.01 seconds"),
        ({"data-schema": '{"classes": ["a", "b"], "input_shape": [5]}'}, "classes"),
    ],
)
def test_what_cannot_be_is_said(
    config: Mapping[str, Any], message: str, ragged: Federation, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, RunError, DataError)) as caught:
        run_deployed(ragged, tmp_path, **({"algorithms": "fedavg"} | config))
    text = str(caught.value) + "".join(file.read_text() for file in tmp_path.rglob("error.log"))
    assert message in text


def test_two_nodes_with_the_same_client_are_told(ragged: Federation, tmp_path: Path) -> None:
    export_clients(ragged, tmp_path / "data", [*GROUPS[:2]])
    export_clients(ragged, tmp_path / "more", [[0]])
    (tmp_path / "more" / "node-0").rename(tmp_path / "data" / "node-2")
    with pytest.raises(DataError, match=r"client '0' is at node 'node-0' and at node 'node-2'"):
        run_deployed(ragged, tmp_path, algorithms="fedavg")


def test_nodes_that_disagree_are_told(ragged: Federation, tmp_path: Path) -> None:
    export_clients(ragged, tmp_path / "data", GROUPS)
    shutil.rmtree(tmp_path / "data" / "node-2")
    other = make_federation([30, 30], features=4)
    export_clients(other, tmp_path / "other", [[0, 1]])
    (tmp_path / "other" / "node-0").rename(tmp_path / "data" / "node-2")
    with pytest.raises(RunError, match="got answers of 2 nodes, expected 3"):
        run_deployed(ragged, tmp_path, algorithms="fedavg")
    assert "input_shape" in (tmp_path / "state-2" / "error.log").read_text()


def test_data_that_changed_since_the_run_began_are_refused(ragged: Federation, tmp_path: Path) -> None:
    run_deployed(ragged, tmp_path, algorithms="fedavg")
    shutil.rmtree(tmp_path / "run" / "fedavg")
    next((tmp_path / "data" / "node-1").glob("*.safetensors")).unlink()
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg")
    assert {client for _, client, _ in result.store.faults()} == {1, 2, 4}
    assert any(
        "its clients differ from the clients at the start" in sentence for sentence in read_log(tmp_path)
    )


def test_the_schema_of_the_nodes_is_taken_where_none_is_given(ragged: Federation, tmp_path: Path) -> None:
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", data_schema="")
    same_numbers(run_simulated("fedavg", ragged), result)
    assert infer_schema(ragged).classes == tuple(result.facts["classes"])


def test_a_hello_that_is_none_is_told(ragged: Federation, tmp_path: Path) -> None:
    class Strange(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.src_node_id == SPOILT:
                    changed(head(clients=[{"name": "a", "sizes": [1, 2]}]))(reply)
            return replies

    with pytest.raises(
        RunError, match="got answers of 2 nodes, expected 3: a node does not introduce itself properly"
    ):
        run_deployed(ragged, tmp_path, algorithms="fedavg", make_grid=Strange)


def test_nobody_takes_the_place_of_a_node_that_is_online(ragged: Federation, tmp_path: Path) -> None:
    """A node that comes with the clients of another one is not asked, and this is said."""

    class Doubled(InProcessGrid):
        def __init__(self, app: Any, nodes: Any, config: Any, lost: Any) -> None:
            super().__init__(app, [*nodes, {**nodes[1], "state": str(tmp_path / "thief")}], config, lost)

        def get_node_ids(self) -> Any:
            begun = any((tmp_path / "run").rglob("000001.safetensors"))
            return list(self.contexts) if begun else list(self.contexts)[:3]

    (result,) = run_deployed(ragged, tmp_path, algorithms="fedmcsa", make_grid=Doubled)
    same_numbers(run_simulated("fedmcsa", ragged), result)
    assert "a second node says that it is node 'node-1', which is online: it is not asked" in read_log(
        tmp_path
    )
    assert not list((tmp_path / "thief").rglob("*.safetensors"))


def test_one_server_at_a_time(ragged: Federation, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(RunError, match="a run is going on in"):
        run_deployed(ragged, tmp_path, algorithms="fedavg")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run-folder: .* cannot be used"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", run_folder=str(tmp_path / "file" / "run"))


def test_what_goes_wrong_on_a_node_is_not_told_to_the_server(ragged: Federation, tmp_path: Path) -> None:
    """Not even where the node cannot write it down."""
    (tmp_path / "state-1").write_text("a file in place of the folder")
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", cohort=1.0)
    reasons = {why for _, client, why in result.store.faults() if client in (1, 2, 4)}
    assert len(reasons) == 1
    assert "state-1" not in (tmp_path / "log.txt").read_text() + str(result.notes) + str(reasons)


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
