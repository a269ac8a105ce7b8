"""Nodes that register: clients, schemas, and nodes that do not belong to the federation."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("flwr", reason="a real federation needs Flower")


from fedattune import DataError, Federation, RunError, load_federation
from fedattune.data import export_clients, infer_schema
from fedattune.deploy.server.registration import Hello
from federations import make_federation
from flower.in_process import InProcessGrid
from flower.runs import GROUPS, read_log, run_deployed, run_simulated
from flower.spoiling import SPOILT, changed, head
from remote_runs import same_numbers


def test_two_nodes_with_the_same_client_are_told(ragged: Federation, tmp_path: Path) -> None:
    export_clients(ragged, tmp_path / "data", [*GROUPS[:2]])
    export_clients(ragged, tmp_path / "more", [[0]])
    (tmp_path / "more" / "node-0").rename(tmp_path / "data" / "node-2")
    with pytest.raises(DataError, match=r"client '0' is at node 'node-0' and at node 'node-2'"):
        run_deployed(ragged, tmp_path, algorithms="fedavg")


def test_data_that_changed_since_the_run_began_are_refused(ragged: Federation, tmp_path: Path) -> None:
    run_deployed(ragged, tmp_path, algorithms="fedavg")
    shutil.rmtree(tmp_path / "run" / "fedavg")
    next((tmp_path / "data" / "node-1").glob("*.safetensors")).unlink()
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg")
    assert {client for _, client, _ in result.store.faults()} == {1, 2, 4}
    assert any("its clients differ from the clients at the start" in sentence for sentence in read_log(tmp_path))


def test_the_same_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    """Parts are drawn by position, so test rows would become training rows; all counts stay equal."""
    table = Path(__file__).parents[2] / "examples" / "hospitals.csv"
    header, *lines = table.read_text(encoding="utf-8").splitlines()
    clinics = sorted({line.split(",")[header.split(",").index("hospital")] for line in lines})
    wards = [tmp_path / "north.csv", tmp_path / "south.csv"]
    mine = [
        [line for line in lines if any(name in line.split(",") for name in names)]
        for names in (clinics[:2], clinics[2:4])
    ]
    for ward, rows in zip(wards, mine, strict=True):
        ward.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    whole = tmp_path / "all.csv"
    whole.write_text("\n".join([header, *mine[0], *mine[1]]) + "\n", encoding="utf-8")
    data = load_federation(whole, client_column="hospital", target="outcome")

    def run(**changes: Any) -> set[int]:
        own = [{"data": str(ward), "client-column": "hospital"} for ward in wards]
        config = {"algorithms": "fedavg", "rounds": 1, "cohort": 1.0, "round_timeout": 20, **changes}
        (result,) = run_deployed(data, tmp_path, groups=[[0, 1], [2, 3]], own=own, **config)
        return {client for _, client, _ in result.store.faults()}

    assert run() == set()
    shutil.rmtree(tmp_path / "run/fedavg")
    wards[1] = wards[1].rename(tmp_path / "moved.csv")
    assert run() == set()
    wards[1].write_text("\n".join([header, *sorted(mine[1], reverse=True)]) + "\n", encoding="utf-8")
    shutil.rmtree(tmp_path / "run/fedavg")
    assert run() == {2, 3}
    assert (
        "the data changed since the run began; bring the same rows back" in (tmp_path / "state-1/error.log").read_text()
    )
    assert run(run_folder=str(tmp_path / "new")) == set()


class Restarted(InProcessGrid):
    """Node 101 is offline at one look after the first round, and comes back with the same key."""

    is_back = False

    def get_node_ids(self) -> Any:
        """All nodes."""
        numbers = list(super().get_node_ids())
        run_folder = Path(self.contexts[SPOILT].run_config["run-folder"])
        if self.is_back or not any(run_folder.rglob("000001.safetensors")):
            return numbers
        self.is_back = True
        return [number for number in numbers if number != SPOILT]


class WithLess(Restarted):
    """One of its clients is gone then."""

    def get_node_ids(self) -> Any:
        """All nodes."""
        numbers = super().get_node_ids()
        if self.is_back:
            files = sorted(Path(str(self.contexts[SPOILT].node_config["data"])).glob("*.safetensors"))
            for file in files[2:]:
                file.unlink()
        return numbers


class Upgraded(Restarted):
    """It has another version of FedAttune then."""

    def pull_messages(self, message_ids: Any) -> Any:
        """The answers."""
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            is_hello = '"kind": "hello"' in str(reply.content["head"]["json"])
            if self.is_back and is_hello and reply.metadata.src_node_id == SPOILT:
                changed(head(fedattune="7.0.0"))(reply)
        return replies


@pytest.mark.parametrize(
    ("grid", "without", "said"),
    [
        (Restarted, {2}, ""),
        (WithLess, {2, 3, 4}, "node 'node-1' does not belong to this federation: its clients differ"),
        (Upgraded, {2, 3, 4}, "node 'node-1' has FedAttune 7.0.0 and the server has"),
    ],
)
def test_a_node_that_comes_back_is_asked_who_it_is(
    grid: type[InProcessGrid], without: set[int], said: str, ragged: Federation, tmp_path: Path
) -> None:
    config = {"algorithms": "fedavg", "rounds": 4, "cohort": 1.0, "round_timeout": 20}
    (result,) = run_deployed(ragged, tmp_path, make_grid=grid, **config)
    faults = result.store.faults()
    assert {client for _, client, _ in faults} == {1, 2, 4}
    assert {round_ for round_, _, _ in faults} == without
    assert {reason for _, _, reason in faults} == {"node 'node-1' was offline"}
    log = read_log(tmp_path)
    assert not said or sum(line.startswith(said) for line in log) == 1
    assert not any("another key" in line for line in log)


def test_a_hello_that_is_none_is_told(ragged: Federation, tmp_path: Path) -> None:
    class Strange(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.src_node_id == SPOILT:
                    changed(head(clients=[{"name": "a", "sizes": [1, 2]}]))(reply)
            return replies

    named = "got answers of 2 nodes, expected 3: the node that calls itself 'node-1' does not introduce itself properly"
    with pytest.raises(RunError, match=rf"{named}: clients\.0\.sizes\.2: field required, got \[1, 2\]"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", make_grid=Strange)


@pytest.mark.parametrize("text", ["a\nfedattune: error: all data deleted", "\x1b[2J", "a\u202eb", "\u2028"])
def test_names_that_would_deceive_a_reader_of_the_log_are_refused(text: str) -> None:
    client = {"name": "a", "number": 0, "sizes": [1, 1, 1]}
    Hello(name="Zürich 北", clients=[client], schema="{}")
    for hello in (
        {"name": text, "clients": [client]},
        {"clients": [client | {"name": text}]},
        {"clients": [client], "fedattune": text},
    ):
        with pytest.raises(ValidationError, match="invisible characters"):
            Hello(schema="{}", **hello)


def test_a_node_that_comes_with_another_key_is_told(ragged: Federation, tmp_path: Path) -> None:
    class Replaced(InProcessGrid):
        """Node 102 leaves after the introductions, and node 103 has its clients."""

        def __init__(self, app: Any, nodes: Any, config: Any, lost: Any) -> None:
            super().__init__(app, [*nodes, {**nodes[2], "state": str(tmp_path / "other")}], config, lost)
            self.gone = 103

        def get_node_ids(self) -> Any:
            return [node for node in self.contexts if node != self.gone]

        def push_messages(self, messages: Any) -> Any:
            numbers = super().push_messages(messages)
            self.gone = 102
            return numbers

    run_deployed(ragged, tmp_path, algorithms="fedavg", make_grid=Replaced)
    (line,) = [line for line in read_log(tmp_path) if "another key" in line]
    assert line.startswith("node 'node-2' came back with another key (Flower's number 102 before, 103 now)")


def test_a_federation_from_a_backup_is_a_later_attempt(ragged: Federation, tmp_path: Path) -> None:
    """Nodes refuse messages of an earlier attempt than the last one that they know."""
    run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=2)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    for rounds in (2, 2):  # each start of the server is an attempt
        shutil.rmtree(tmp_path / "run/fedavg")
        run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=rounds)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/fedavg")
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=2)
    assert not result.store.faults()


def test_nobody_takes_the_place_of_a_node_that_is_online(ragged: Federation, tmp_path: Path) -> None:
    """A node that comes with the clients of another one is not asked, and this is said."""

    class Doubled(InProcessGrid):
        def __init__(self, app: Any, nodes: Any, config: Any, lost: Any) -> None:
            super().__init__(app, [*nodes, {**nodes[1], "state": str(tmp_path / "thief")}], config, lost)

        def get_node_ids(self) -> Any:
            begun = any((tmp_path / "run").rglob("000001.safetensors"))
            return list(self.contexts) if begun else list(self.contexts)[:3]

    (result,) = run_deployed(ragged, tmp_path, algorithms="fedmcsa", make_grid=Doubled)
    same_numbers(run_simulated("fedmcsa", ragged), result, measured=False)
    assert "a second node says that it is node 'node-1', which is online: it is not asked" in read_log(tmp_path)
    assert not list((tmp_path / "thief").rglob("*.safetensors"))


def rewrite(values: Mapping[int, Mapping[str, Any]]) -> type[InProcessGrid]:
    """A grid whose nodes introduce themselves otherwise: number of a node -> values of its introduction."""

    class Rewritten(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                mine = values.get(reply.metadata.src_node_id)
                if mine and '"kind": "hello"' in str(reply.content["head"]["json"]):
                    changed(head(**mine))(reply)
            return replies

    return Rewritten


def test_all_problems_of_all_nodes_come_at_once(ragged: Federation, tmp_path: Path) -> None:
    other = infer_schema(make_federation([30, 30], features=4)).to_json()
    empty = [{"name": "x", "number": None, "sizes": [0, 0, 3]}]
    grid = rewrite({101: {"schema": other, "clients": empty}, 102: {"fedattune": "7.0.0"}})
    with pytest.raises(RunError) as caught:
        run_deployed(ragged, tmp_path, algorithms="fedavg", make_grid=grid)
    text = str(caught.value)
    assert "got answers of 1 nodes, expected 3" in text
    assert "node 'node-1' does not fit the schema: expected" in text
    assert "the client 'x' at node 'node-1' has 0 samples to train and 3 to test" in text
    assert "node 'node-2' has FedAttune 7.0.0" in text


def test_an_impossible_number_of_samples_leaves_only_its_node_out(ragged: Federation, tmp_path: Path) -> None:
    """The claim is checked where it arrives; the node and the claim are named, and the others go on."""
    claim = [{"name": "x", "number": None, "sizes": [2**70, 0, 3]}]
    wrong = (
        "the node that calls itself 'node-2' does not introduce itself properly: clients.0.sizes.0: input should be "
        "less than or equal to 1099511627776, got 1180591620717411303424; correct its data or nodes/N.toml"
    )
    grid = rewrite({102: {"clients": claim}})
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", nodes=2, make_grid=grid)
    assert [client.id for client in result.clients] == ["0", "1", "2", "3", "4"]
    assert f"left out of the federation: {wrong}" in read_log(tmp_path)
    assert f"{wrong}; the server does not ask this node for 10 minutes" in read_log(tmp_path)


def test_a_bad_node_beyond_the_minimum_is_left_out_and_named(ragged: Federation, tmp_path: Path) -> None:
    other = infer_schema(make_federation([30, 30], features=4)).to_json()
    grid = rewrite({102: {"schema": other}})
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", nodes=2, make_grid=grid)
    assert [client.id for client in result.clients] == ["0", "1", "2", "3", "4"]
    why = "left out of the federation: node 'node-2' does not fit the schema"
    assert any(sentence.startswith(why) for sentence in read_log(tmp_path))
    assert any(note.startswith(why) for note in result.notes)
    (again,) = run_deployed(ragged, tmp_path, algorithms="fedavg", nodes=2, make_grid=grid)
    assert again.notes == result.notes


@pytest.mark.parametrize("schema", ["x", "[]", '{"classes": 3}'])
def test_a_first_node_without_a_schema_is_left_out(schema: str, ragged: Federation, tmp_path: Path) -> None:
    grid = rewrite({100: {"schema": schema}})
    config: dict[str, Any] = {"algorithms": "fedavg", "rounds": 1, "data_schema": "", "make_grid": grid}
    (result,) = run_deployed(ragged, tmp_path, nodes=2, **config)
    assert [client.id for client in result.clients] == ["1", "2", "4", "5"]
    assert any(one.startswith("left out of the federation: node 'node-0': the schema") for one in read_log(tmp_path))
    with pytest.raises(DataError, match="got answers of 2 nodes, expected 3: node 'node-0': the schema"):
        run_deployed(ragged, tmp_path / "all", **config)
