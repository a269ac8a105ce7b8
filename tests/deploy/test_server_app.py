"""The ServerApp and ClientApp without a network: every method gives the simulator's numbers."""

import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from filelock import FileLock
from flwr.app import Context, Message, RecordDict

from conformance.table import Case, some_methods
from fedattune import (
    ConfigError,
    DataError,
    FedAttuneError,
    Federation,
    RunError,
    federation_from,
    load_federation,
    predict,
)
from fedattune.deploy.grid import unpack_record
from fedattune.deploy.node.client_app import make_client_app
from fedattune.deploy.server import backend
from fedattune.deploy.server.server_app import make_server_app
from fedattune.training.backends.message import WorkerMessage, split_message
from flower.in_process import InProcessGrid
from flower.runs import find_models, read_log, run_deployed, run_simulated
from remote_runs import same_numbers


@some_methods
def test_the_numbers_are_the_simulators(case: Case, ragged: Federation, tmp_path: Path) -> None:
    options = "; ".join(f"{case.name}.{key}={value}" for key, value in case.same.items())
    (result,) = run_deployed(ragged, tmp_path, algorithms=case.name, set=options)
    # The buffers that FedRoD's global model would need say how often a client has each class, and stay there.
    points = ("received", "trained") if case.name == "fedrod" else ("received", "trained", "global")
    same_numbers(run_simulated(case.name, ragged, case.same), result, points, measured=False)
    assert read_log(tmp_path)[0].startswith("6 clients at 3 nodes")


def test_a_nodes_model_predicts_for_new_rows_of_its_client(tmp_path: Path) -> None:
    """The file on the node says how rows are prepared, as that of the simulator does."""
    table = Path(__file__).parents[2] / "examples" / "hospitals.csv"
    hospitals = load_federation(table, client_column="hospital", target="outcome")
    run_deployed(hospitals, tmp_path, algorithms="fedavg", groups=[range(6), range(6, 12)])
    run_simulated("fedavg", hospitals).export("H09", tmp_path / "m.safetensors")
    ours, theirs = (
        predict(file, table) for file in (tmp_path / "m.safetensors", find_models(tmp_path, "fedavg")["H09"])
    )
    np.testing.assert_allclose(theirs.probabilities, ours.probabilities, atol=1e-12)
    assert theirs.notes == ours.notes


def read_parts(message: Message) -> list[WorkerMessage]:
    """The parts of a message between server and node; none for the answer to a hello."""
    content = unpack_record(message.content)
    return [] if content.head["kind"] == "hello" else split_message(content)


def test_what_travels_is_what_is_accounted(ragged: Federation, tmp_path: Path) -> None:
    """With a client per node, the tensors of the training messages have the bytes of the simulator's account."""
    seen = {"up": 0, "down": 0}

    def weigh(_: int, message: Message) -> bool:
        for part in read_parts(message):
            if part.head["kind"] == "train":
                seen["down"] += sum(v.nbytes for k, v in part.tensors.items() if k.startswith("sent/"))
        return False

    class Weighed(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            tensors = (pair for reply in replies for part in read_parts(reply) for pair in part.tensors.items())
            seen["up"] += sum(v.nbytes for k, v in tensors if k.startswith("upload/"))
            return replies

    more = {"lost": weigh, "make_grid": Weighed, "groups": [[i] for i in range(6)], "rounds": 2}
    for name in ("scaffold", "fedrep", "pfedla"):
        seen.update(up=0, down=0)
        (result,) = run_deployed(ragged, tmp_path / name, algorithms=name, **more)
        assert (result.bytes_up, result.bytes_down) == (seen["up"], seen["down"])


def test_personal_tensors_and_memory_stay_on_the_node(ragged: Federation, tmp_path: Path) -> None:
    """No message of FedRep has the head, none of APFL the private model, none of Local anything."""
    names: dict[str, set[str]] = {}

    class Spied(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            tensors = (k for reply in replies for part in read_parts(reply) for k in part.tensors)
            names["seen"] |= {k for k in tensors if not k.startswith("scores/")}
            return replies

    for name, expected in (
        ("local", set()),
        ("fedrep", {f"upload/params/{k}" for k in ("0.weight", "0.bias", "1.weight", "1.bias")}),
    ):
        names["seen"] = set()
        run_deployed(ragged, tmp_path / name, algorithms=name, make_grid=Spied)
        assert names["seen"] <= expected, name


class Counted(InProcessGrid):
    """Count the messages that carry work."""

    work = 0

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        type(self).work += sum(bool(read_parts(message)) for message in messages)
        return super().push_messages(messages)


@pytest.mark.parametrize(
    ("name", "most", "messages"),
    # An evaluation comes with the next training, the last one alone. Local trains a round, then all at once.
    [("fedavg", 100, 3 * 5), ("local", 100, 3 * 2), ("local", 2, 3 * 3)],
)
def test_messages_are_few(
    name: str, most: int, messages: int, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_ROUNDS_PER_MESSAGE", most)
    monkeypatch.setattr(Counted, "work", 0)
    work = {"cohort": 1.0, "rounds": 4}
    (result,) = run_deployed(ragged, tmp_path, algorithms=name, make_grid=Counted, round_timeout=60, **work)
    assert Counted.work == messages
    same_numbers(run_simulated(name, ragged, **work), result)


def test_a_refused_restart_leaves_the_experiment_as_it_is(ragged: Federation, tmp_path: Path) -> None:
    run_deployed(ragged, tmp_path, algorithms="fedavg", rounds=1)
    files = [tmp_path / "run" / name for name in ("experiment.yaml", "SHA256SUMS")]
    before = [file.read_bytes() for file in files]
    with pytest.raises(RunError, match=r"is of another run: lr was .* and is 0\.0123; take another folder"):
        run_deployed(ragged, tmp_path, algorithms="local,fedavg", rounds=1, lr=0.0123)
    assert [file.read_bytes() for file in files] == before
    run_deployed(ragged, tmp_path, algorithms="local,fedavg", rounds=1)  # one more method with the same settings
    assert "local" in files[0].read_text()


class Killed(BaseException):
    """The server's process ends."""


@pytest.mark.parametrize(
    ("name", "after"),
    # Of messages: 3 to meet, then 3 in every round, which train and evaluate the round before.
    [("fedrep", 4), ("scaffold", 11)],
)
def test_a_server_that_is_killed_goes_on(name: str, after: int, ragged: Federation, tmp_path: Path) -> None:
    """Before any message of a run: nodes that trained the round already go back and train it again."""
    left = iter(range(after))

    def dies(*_: Any) -> bool:
        if next(left, None) is None:
            raise Killed
        return False

    with pytest.raises(Killed):
        run_deployed(ragged, tmp_path, algorithms=name, lost=dies)
    gc.collect()  # a process that ends closes its files
    (result,) = run_deployed(ragged, tmp_path, algorithms=name)
    same_numbers(run_simulated(name, ragged), result, measured=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rouns": 3}, "run configuration: unknown key 'rouns', did you mean 'rounds'"),
        ({"rounds": 0}, "run configuration: rounds: input should be greater than or equal to 1, got 0"),
        ({"algorithms": "fedmcsaa"}, "did you mean 'fedmcsa'"),
        ({"set": "fedavg.mu=1"}, "mu"),
        ({"engine": "sequential"}, "engine is for simulations"),
        ({"cohort": 7}, "cohort: got 7 clients per round, expected at most the 6"),
        ({"nodes": 4, "start-timeout": 0.01}, "waiting for 4 nodes: got 3 online after 0.01 seconds"),
        ({"data-schema": '{"classes": ["a", "b"], "input_shape": [5]}'}, "classes"),
    ],
)
def test_what_cannot_be_is_said(config: Mapping[str, Any], message: str, ragged: Federation, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, RunError, DataError)) as caught:
        run_deployed(ragged, tmp_path, **({"algorithms": "fedavg"} | config))
    text = str(caught.value) + "".join(file.read_text() for file in tmp_path.rglob("error.log"))
    assert message in text


def test_an_error_of_the_server_app_is_one_sentence_for_flower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Flower makes the text of the exception the status of the run, and logs the exception."""
    context = Context(1, 1, {}, RecordDict(), {"rouns": 3, "run-folder": str(tmp_path / "run")})
    grid = InProcessGrid(make_client_app(), [], {})
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ConfigError, match="unknown key 'rouns', did you mean 'rounds'") as caught:
            make_server_app()(grid, context)
        logger.error("raised", exc_info=caught.value)
    finally:
        logger.removeHandler(caplog.handler)
        for one in list(logger.filters):
            logger.removeFilter(one)
    assert "fedattune: error: run configuration: unknown key 'rouns'" in capsys.readouterr().out
    assert "raised" in caplog.text
    assert "Traceback" not in caplog.text


def test_one_server_at_a_time(ragged: Federation, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(RunError, match="is being written by another process"):
        run_deployed(ragged, tmp_path, algorithms="fedavg")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run-folder: .* cannot be used"):
        run_deployed(ragged, tmp_path, algorithms="fedavg", run_folder=str(tmp_path / "file" / "run"))


def test_what_goes_wrong_on_a_node_is_not_told_to_the_server(ragged: Federation, tmp_path: Path) -> None:
    """Not even where the node cannot write it down; without its audit log, the node tells nothing else either."""
    (tmp_path / "state-1").write_text("a file in place of the folder")
    with pytest.raises(RunError, match=r"a node failed \(FileExistsError; ") as caught:
        run_deployed(ragged, tmp_path, algorithms="fedavg", cohort=1.0)
    assert "state-1" not in (tmp_path / "log.txt").read_text() + str(caught.value)


def test_numbers_as_targets_are_the_simulators(tmp_path: Path) -> None:
    """Nodes measure in the unit of the target, whose mean and deviation the schema tells them."""
    table = tmp_path / "prices.csv"
    random = np.random.default_rng(0)
    rows = [(f"city{i % 4}", random.normal(80, 20), 300_000 + 50_000 * (i % 4)) for i in range(80)]
    lines = [f"{city},{area:.1f},{base + 1500 * area:.0f}" for city, area, base in rows]
    table.write_text("\n".join(["city,area,price", *lines]) + "\n")
    prices = load_federation(table, client_column="city", target="price")
    groups = [[0, 3], [1, 2]]
    (result,) = run_deployed(prices, tmp_path, algorithms="fedmcsa", groups=groups)
    whole = run_simulated("fedmcsa", prices)
    same_numbers(whole, result, measured=False)
    assert result.metrics["rmse_uniform"] > 1000
    errors = [client.trained for client in result.clients]
    assert result.metrics["rmse_uniform"] == pytest.approx(np.mean(errors))
    (file,) = (file for name, file in find_models(tmp_path, "fedmcsa").items() if name == "city2")
    whole.export("city2", tmp_path / "m.safetensors")
    ours, theirs = (predict(one, table) for one in (tmp_path / "m.safetensors", file))
    np.testing.assert_allclose(theirs.values, ours.values, rtol=1e-9)


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_several_targets_are_the_simulators(kind: str, tmp_path: Path) -> None:
    table = Path(__file__).parents[2] / "examples" / "symptoms.csv"
    target = "infection,anaemia,asthma" if kind == "labels" else "crp,glucose"
    clinics = load_federation(table, client_column="clinic", target=target)
    (result,) = run_deployed(clinics, tmp_path, algorithms="attune", groups=[range(3), range(3, 6)])
    assert result.kind == kind
    same_numbers(run_simulated("attune", clinics), result, ("received",), measured=False)
    file = find_models(tmp_path, "attune")["south-1"]
    assert predict(file, table).names == tuple(target.split(","))


def test_classes_of_positions_are_for_simulations(tmp_path: Path) -> None:
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20, 4))
    data = federation_from([(x, y), (x, y)])
    with pytest.raises(FedAttuneError, match="a class for each position, which is for simulations"):
        run_deployed(data, tmp_path, algorithms="fedavg", groups=[[0], [1]])
