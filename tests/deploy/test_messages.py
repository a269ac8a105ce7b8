"""Messages that are lost, and nodes whose version of FedAttune changes: what is asked again, and what is kept."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from fedattune import Algorithm, Federation, fit
from fedattune.client import SGD
from fedattune.core.algorithm import ServerUpdate
from fedattune.core.params import Params
from fedattune.core.payload import Broadcast, LocalState, Payload, ServerState
from fedattune.core.selectors import AllParameters
from fedattune.deploy.grid import CALLS
from fedattune.deploy.server import backend
from fedattune.deploy.server.backend import NodeBackend, NodeTransport
from flower.in_process import InProcessGrid
from flower.runs import RUN, read_log, run_deployed, run_simulated
from remote_runs import same_numbers

NODE = 101
"""Flower's number of the node with clients 1, 2 and 4, which has the trouble."""


def read_head(message: Message) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(str(message.content["head"]["json"]))
    return head


def test_local_gets_a_second_chance_for_many_rounds(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeBackend, "_count_rounds", lambda self: 3)
    left = [True]

    def lost(node: int, message: Message) -> bool:
        is_long = read_head(message)["kind"] == "several" and node == NODE
        return is_long and bool(left) and left.pop()

    settings = {"cohort": 1.0, "rounds": 8, "eval_every": 4}
    (result,) = run_deployed(ragged, tmp_path, algorithms="local", lost=lost, round_timeout=2, **settings)
    assert not left
    assert not result.store.faults()
    same_numbers(run_simulated("local", ragged, **settings), result)


class Interrupted(InProcessGrid):
    """A SuperLink that goes away at every second call. It keeps the first message that it got, under its id."""

    calls = 0

    def interrupt(self) -> None:
        self.calls += 1
        if self.calls % 2:
            raise ConnectionError("the SuperLink goes away")

    def get_node_ids(self) -> Iterable[int]:
        self.interrupt()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        first, *others = messages
        if not first.metadata.message_id:
            super().push_messages([first])
        self.interrupt()
        super().push_messages(others)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.interrupt()
        return super().pull_messages(message_ids)


def test_a_superlink_that_restarts_is_called_again(ragged: Federation, tmp_path: Path) -> None:
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedmcsa", make_grid=Interrupted, round_timeout=20)
    assert not result.store.faults()
    same_numbers(run_simulated("fedmcsa", ragged), result)


def test_a_superlink_that_fails_for_good_ends_the_run(ragged: Federation, tmp_path: Path) -> None:
    calls = []

    class Gone(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            calls.append(messages)
            raise RuntimeError("the SuperLink is gone")

    with pytest.raises(RuntimeError, match="is gone"):
        run_deployed(ragged, tmp_path, algorithms="fedmcsa", make_grid=Gone)
    assert len(calls) == CALLS
    assert all(messages is calls[0] for messages in calls)


def test_a_node_that_stays_away_is_waited_for_once(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_ROUNDS_PER_MESSAGE", 1)
    waits = []
    wait = NodeTransport._wait_for

    def counted(self: NodeTransport, workers: Any) -> None:
        slept: list[float] = []
        clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
        with monkeypatch.context() as patch:
            patch.setattr(backend, "time", clock)
            wait(self, workers)
        waits.append(sum(slept))

    monkeypatch.setattr(NodeTransport, "_wait_for", counted)

    class Away(InProcessGrid):
        """A node leaves after its first round."""

        def get_node_ids(self) -> Any:
            has_begun = any((tmp_path / "run").rglob("000001.safetensors"))
            return [node for node in super().get_node_ids() if not (has_begun and node == NODE)]

    (result,) = run_deployed(ragged, tmp_path, algorithms="local", make_grid=Away, cohort=1.0, round_timeout=1)
    assert [seconds for seconds in waits if seconds] == [pytest.approx(1, abs=0.1)]
    assert {client for _, client, _ in result.store.faults()} == {1, 2, 4}


@dataclass(frozen=True)
class SendsNumber(SGD):
    """All weights stay with the client; one number travels, and moves the weights of all."""

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: Any) -> Any:
        number = sent.extra["number"]["p"]
        moved = sent.params.map(lambda v: v + number.to(v.dtype))
        return super().begin(sent._replace(params=moved), local_state, fresh, context)

    def finish(self, carry: Any, sent: Payload, local_state: LocalState, context: Any) -> tuple[Payload, LocalState]:
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

    def aggregate(self, state: ServerState, ids: Tensor, sent: Payload, uploads: Payload, n: Tensor) -> ServerState:
        return {**state, "number": uploads.extra["number"].map(lambda v: v.mean(0))}


OWN = Algorithm(SendsNumber(), MeanNumber(), personal=AllParameters())


def test_a_method_that_sends_something_beside_the_model_is_not_alone(ragged: Federation, tmp_path: Path) -> None:
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
    options = {"make_grid": make_late(tmp_path), "nodes": 2, "round_timeout": 20, "rounds": 4}
    (result,) = run_deployed(ragged, tmp_path, algorithms="own", custom={"own": OWN}, **options)
    assert result.is_finished
    assert len(result.clients) == 5
    assert any("node-2' cannot join, as the method does not take" in line for line in read_log(tmp_path))
