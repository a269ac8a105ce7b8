"""Messages that are lost, and nodes whose version of FedAttune changes: what is asked again, and what is kept."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from conformance.test_conformance import RUN
from fedattune import Algorithm, Federation, Result, fit
from fedattune.client import SGD
from fedattune.core.algorithm import ServerUpdate
from fedattune.core.params import Params
from fedattune.core.payload import Broadcast, LocalState, Payload, ServerState
from fedattune.core.selectors import AllParameters
from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.deploy.server import backend
from fedattune.deploy.server.backend import FlowerBackend
from fedattune.runs.rows import RowStorage
from fedattune.training.backends.message import WorkerMessage
from flower.in_process import InProcessGrid
from flower.runs import read_log, run_deployed, run_simulated
from remote_runs import same_numbers

NODE = 101
"""Flower's number of the node with clients 1, 2 and 4, which has the trouble."""


def read_head(message: Message) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(str(message.content["head"]["json"]))
    return head


def count_clients(result: Result, point: str) -> list[tuple[int, int]]:
    """Return each evaluated round with its number of clients."""
    return [(r, scores.shape[1]) for r, where, scores in result.store.scores("test") if where == point]


def test_local_gets_a_second_chance_for_many_rounds(ragged: Federation, tmp_path: Path) -> None:
    left = [True]

    def lost(node: int, message: Message) -> bool:
        is_long = read_head(message)["kind"] == "several" and node == NODE
        return is_long and bool(left) and left.pop()

    settings = {"cohort": 1.0, "rounds": 8, "eval_every": 4}
    (result,) = run_deployed(ragged, tmp_path, algorithms="local", lost=lost, round_timeout=2, **settings)
    assert not left
    assert not result.store.faults()
    same_numbers(run_simulated("local", ragged, **settings), result)


def test_a_node_that_stays_away_is_waited_for_once(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_ROUNDS_PER_MESSAGE", 1)
    waits = []
    wait = FlowerBackend._wait_for

    def counted(self: FlowerBackend, workers: Any) -> None:
        slept: list[float] = []
        clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
        with monkeypatch.context() as patch:
            patch.setattr(backend, "time", clock)
            wait(self, workers)
        waits.append(sum(slept))

    monkeypatch.setattr(FlowerBackend, "_wait_for", counted)

    class Away(InProcessGrid):
        """A node leaves after its first round."""

        def get_node_ids(self) -> Any:
            has_begun = any((tmp_path / "run").rglob("000001.safetensors"))
            return [node for node in super().get_node_ids() if not (has_begun and node == NODE)]

    (result,) = run_deployed(
        ragged, tmp_path, algorithms="local", make_grid=Away, cohort=1.0, round_timeout=1
    )
    assert [seconds for seconds in waits if seconds] == [pytest.approx(1, abs=0.1)]
    assert {client for _, client, _ in result.store.faults()} == {1, 2, 4}


class Downgraded(InProcessGrid):
    """From round 3 on, the node has a version that reads the first format alone."""

    def push_messages(self, messages: Any) -> Any:
        numbers: list[str] = []
        for message in messages:
            self.is_old = self.is_old or read_head(message).get("round") == 3
            is_odd = self.is_old and message.content["head"]["version"] != 1
            if message.metadata.dst_node_id != NODE or not is_odd:
                numbers += super().push_messages([message])
                continue
            number = message.metadata._message_id = str(next(self._numbers))
            self._identify(NODE)
            failed = WorkerMessage({"kind": "failed", "error": "MessageFormatError"})
            self._replies[number] = Message(pack_record(failed), reply_to=message)
            self._identify(1)
            numbers.append(number)
        return numbers

    is_old = False


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "local"])
def test_a_node_that_is_put_back_to_an_older_version_goes_on(
    name: str, ragged: Federation, tmp_path: Path
) -> None:
    settings = {"cohort": 1.0, "rounds": 6, "eval_every": 2}
    (result,) = run_deployed(
        ragged, tmp_path, algorithms=name, make_grid=Downgraded, round_timeout=20, **settings
    )
    assert not result.store.faults()
    same_numbers(run_simulated(name, ragged, **settings), result)


class Older(InProcessGrid):
    """The node's version reads the first format alone: its introduction names no format."""

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            assert message.metadata.dst_node_id != NODE or message.content["head"]["version"] == 1
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        for reply in super().pull_messages(message_ids):
            content = unpack_record(reply.content)
            if reply.metadata.src_node_id == NODE and content.head["kind"] == "hello":
                del content.head["format"]
                reply.content = pack_record(content)
            yield reply


@pytest.mark.parametrize("name", ["fedmcsa", "local"])
def test_a_node_of_the_version_before_gets_each_message_apart(
    name: str, ragged: Federation, tmp_path: Path
) -> None:
    (result,) = run_deployed(ragged, tmp_path, algorithms=name, make_grid=Older, cohort=1.0, round_timeout=20)
    same_numbers(run_simulated(name, ragged, cohort=1.0), result)


def test_scores_of_an_older_node_count_though_the_training_after_them_is_lost(
    ragged: Federation, tmp_path: Path
) -> None:
    def lost(node: int, message: Message) -> bool:
        head = read_head(message)
        return node == NODE and head["kind"] == "train" and head["round"] == 3

    (result,) = run_deployed(
        ragged, tmp_path, algorithms="fedavg", make_grid=Older, lost=lost, cohort=1.0, eval_every=1
    )
    assert count_clients(result, "received") == [(1, 6), (2, 6), (3, 6), (4, 6)]
    assert {r for r, _, _ in result.store.faults()} == {3}


def test_local_of_an_older_node_is_asked_again_from_the_lost_round_on(
    ragged: Federation, tmp_path: Path
) -> None:
    """Its rounds are messages of their own, and those before the lost one are done."""
    left = [True]

    def lost(node: int, message: Message) -> bool:
        head = read_head(message)
        is_lost = node == NODE and head["kind"] == "train" and head["round"] == 5
        return is_lost and bool(left) and left.pop()

    settings = {"cohort": 1.0, "rounds": 8, "eval_every": 2}
    (result,) = run_deployed(
        ragged, tmp_path, algorithms="local", make_grid=Older, lost=lost, round_timeout=2, **settings
    )
    assert not left
    assert not result.store.faults()
    same_numbers(run_simulated("local", ragged, **settings), result)


def test_the_log_names_the_round_of_an_accuracy_that_came_later(ragged: Federation, tmp_path: Path) -> None:
    run_deployed(ragged, tmp_path, algorithms="fedavg", cohort=1.0, rounds=4, eval_every=2)
    lines = [line for line in read_log(tmp_path) if line.startswith("fedavg, seed 0: round")]
    ends = [line.partition(", accuracy ")[2].partition(" ")[2] for line in lines]
    assert ends == ["", "", "after round 2", ""]
    assert ["accuracy" in line for line in lines] == [False, False, True, True]


@dataclass(frozen=True)
class SendsNumber(SGD):
    """All weights stay with the client; one number travels, and moves the weights of all."""

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: Any) -> Any:
        number = sent.extra["number"]["p"]
        moved = sent.params.map(lambda v: v + number.to(v.dtype))
        return super().begin(sent._replace(params=moved), local_state, fresh, context)

    def finish(
        self, carry: Any, sent: Payload, local_state: LocalState, context: Any
    ) -> tuple[Payload, LocalState]:
        upload, state = super().finish(carry, sent, local_state, context)
        total = torch.stack([v.sum() for v in upload.params.values()]).sum()
        return Payload(upload.params, {"number": Params(p=0.05 * total.tanh().reshape(1))}), state


@dataclass(frozen=True)
class MeanNumber(ServerUpdate):
    """Sends the mean of the clients' numbers. Its state has no `w`, so it cannot serve newcomers."""

    def init(self, w0: Params, n_clients: int) -> ServerState:
        return {"model": w0, "number": Params(p=torch.zeros(1))}

    def broadcast(self, state: ServerState, ids: Tensor) -> Broadcast:
        model, number = (state[key].repeat(len(ids)) for key in ("model", "number"))  # type: ignore[union-attr]
        return Broadcast(Payload(model, {"number": number}))

    def aggregate(
        self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor
    ) -> ServerState:
        return {**state, "number": uploads.extra["number"].map(lambda v: v.mean(0))}


OWN = Algorithm(SendsNumber(), MeanNumber(), personal=AllParameters())


def test_a_method_that_sends_something_beside_the_model_is_not_alone(
    ragged: Federation, tmp_path: Path
) -> None:
    (result,) = run_deployed(ragged, tmp_path, algorithms="own", custom={"own": OWN}, round_timeout=20)
    same_numbers(
        fit(ragged, OWN, "dnn", model_options={"hidden": 6}, **(RUN | {"early_stopping": "off"})),
        result,
        measured=False,
    )


def make_late(folder: Path) -> type[InProcessGrid]:
    """Make a grid whose last node comes after the second round."""

    class Late(InProcessGrid):
        def get_node_ids(self) -> Any:
            has_come = any((folder / "run").rglob("000002.safetensors"))
            return [node for node in super().get_node_ids() if has_come or node != 102]

    return Late


def test_a_method_that_cannot_take_newcomers_goes_on_without_them(ragged: Federation, tmp_path: Path) -> None:
    options = {"make_grid": make_late(tmp_path), "nodes": 2, "round_timeout": 20}
    (result,) = run_deployed(ragged, tmp_path, algorithms="own", custom={"own": OWN}, **options)
    assert result.is_finished
    assert len(result.clients) == 5
    assert any("node-2' cannot join, as the method does not take" in line for line in read_log(tmp_path))


def test_a_newcomer_for_whom_there_is_no_memory_cannot_join(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RowStorage, "choose", lambda settings, n, size, folder, **more: RowStorage(n, n > 5, folder, **more)
    )
    options = {"make_grid": make_late(tmp_path), "nodes": 2, "round_timeout": 20}
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedmcsa", **options)
    assert result.is_finished
    assert len(result.clients) == 5
    assert any("clients cannot join a run whose clients are on disk" in line for line in read_log(tmp_path))
