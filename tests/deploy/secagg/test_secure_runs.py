"""Runs whose server learns sums over nodes only: the numbers of plain runs, and what is left when nodes fail."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from flwr.app import Message

from fedattune import Federation, Result
from fedattune.core.errors import ConfigError
from fedattune.core.io import load_tensors
from fedattune.deploy.grid import unpack_record
from fedattune.deploy.operate.audit import AuditLog
from fedattune.deploy.secagg.session import STEPS
from fedattune.runs.metrics import MERGED_NAME
from fedattune.training.backends.message import WorkerMessage
from flower.in_process import InProcessGrid
from flower.runs import find_models, read_log, run_deployed, run_secure

FIVE = ([0, 3], [1], [2], [4], [5])
"""Clients of five nodes, of which four are enough for a sum."""

RUN: dict[str, Any] = {"cohort": 1.0, "rounds": 3, "eval_every": 2}

WEIGHT_ERROR = 1e-5
"""A mean is rounded to 2^-25, some 3e-8; three rounds of training make a hundred times of it at most."""

UNDEFENDED: dict[str, Any] = {"screening": "off", "accept": "always"}
"""A plain run that is compared: under secure aggregation, nobody looks at single uploads, nor at who refuses."""

NORMED = {"model": "flower.models:normed"}


def read_head(message: Message) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(str(message.content["head"]["json"]))
    return head


def pool(result: Result, point: str, r: int) -> tuple[float, float]:
    """Return accuracy and mean loss over the test rows of all clients."""
    for round_, where, (n, correct, loss) in result.store.scores("test"):
        if (round_, where) == (r, point):
            return float(correct.sum() / n.sum()), float(loss.sum() / n.sum())
    raise AssertionError(f"no scores of round {r}")


def load_models(folder: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    return {client: load_tensors(file)[0] for client, file in find_models(folder, name).items()}


def same_models(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for client, state in one.items():
        for key, value in state.items():
            torch.testing.assert_close(other[client][key], value, rtol=0, atol=WEIGHT_ERROR)


@pytest.mark.parametrize(
    ("name", "config"),
    [("scaffold", {}), ("fednova", {}), ("l2gd", {"set": "l2gd.p=0.6"}), ("ditto", NORMED | {"bn_buffers": "average"})],
)
def test_the_numbers_are_those_of_a_plain_run(
    name: str, config: dict[str, Any], ragged: Federation, tmp_path: Path
) -> None:
    config = {**RUN, **config, "algorithms": name}
    (secure,) = run_secure(ragged, tmp_path / "secure", **config)
    (plain,) = run_deployed(ragged, tmp_path / "plain", **UNDEFENDED, **config)
    same_models(load_models(tmp_path / "plain", name), load_models(tmp_path / "secure", name))
    for r, point in ((2, "received"), (2, "trained"), (3, "received")):
        assert pool(secure, point, r) == pytest.approx(pool(plain, point, r), abs=1e-4)
    assert secure.local_steps == plain.local_steps
    assert [one.id for one in secure.clients] == [MERGED_NAME]
    assert secure.clients[0].n_train == sum(one.n_train for one in plain.clients)
    ends = [run.history[-1]["received"] for run in (secure, plain)]
    assert ends[0]["acc_uniform"] == pytest.approx(ends[1]["acc_pooled"], abs=1e-4)
    assert not secure.store.faults()
    assert not list(secure.mixing)


class Recording(InProcessGrid):
    """Keep what leaves the nodes."""

    replies: list[WorkerMessage]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = list(super().push_messages(messages))
        type(self).replies += [unpack_record(self._replies[number].content) for number in numbers]
        return numbers


def test_no_single_number_leaves_a_node(ragged: Federation, tmp_path: Path) -> None:
    Recording.replies = []
    run_secure(ragged, tmp_path, algorithms="fedavg", make_grid=Recording, **RUN)
    models = load_models(tmp_path, "fedavg")
    weights = [torch.cat([v.reshape(-1) for v in state.values()]).double().numpy() for state in models.values()]
    kinds = {reply.head["kind"] for reply in Recording.replies}
    assert kinds == {"hello", *(f"secure-{step}" for step in STEPS)}
    n_masked = 0
    for reply in Recording.replies:
        assert reply.tensors.keys() == ({"masked"} if reply.head["kind"] == "secure-masked" else set())
        keys = reply.head.keys() - {"kind", "token", "algorithm", "seed", "round"}
        assert not keys & {"scores", "ids", "steps", "diverged", "n_trained", "loaded"}
        if reply.tensors:
            n_masked += 1
            masked = reply.tensors["masked"].numpy()
            for w in weights if len(masked) > 5 + len(weights[0]) else []:
                seen = masked[5 : 5 + len(w)].astype(float)
                # Two independent vectors of 57 numbers correlate by 1/sqrt(57) = 0.13; five times that never happens.
                assert abs(np.corrcoef(seen, w)[0, 1]) < 5 / np.sqrt(len(w))
    assert n_masked == 3 * 4  # three rounds, and the evaluation after the last


# Each step: test_protocol.py, without a network.
@pytest.mark.parametrize("step", ["masked", "unmask"])
def test_a_node_that_is_lost_at_any_step(step: str, ragged: Federation, tmp_path: Path) -> None:
    def is_lost(node: int, message: Message) -> bool:
        head = read_head(message)
        return node == 104 and head["kind"] == f"secure-{step}" and head["round"] == 2

    def is_lost_plain(node: int, message: Message) -> bool:
        return node == 104 and read_head(message).get("round") == 2 and step in STEPS[:3]

    config = {**RUN, "algorithms": "fedavg", "groups": FIVE, "eval_every": 2}
    (secure,) = run_secure(ragged, tmp_path / "secure", lost=is_lost, **config)
    told = "the scores of round 2 are without the clients of node 'node-4'"
    assert any(told in note for note in secure.notes) == (step in STEPS[:3])
    (plain,) = run_deployed(ragged, tmp_path / "plain", **UNDEFENDED, lost=is_lost_plain, **config)
    same_models(load_models(tmp_path / "plain", "fedavg"), load_models(tmp_path / "secure", "fedavg"))
    faults = [(r, client) for r, client, _ in secure.store.faults()]
    assert faults == [(r, client) for r, client, _ in plain.store.faults()]
    assert faults == ([(2, 5)] if step in STEPS[:3] else [])
    assert not list(tmp_path.rglob("secure/state-[0-3]/**/secure-session.json"))


@pytest.mark.parametrize("step", ["survivors"])
def test_below_the_threshold_the_round_is_skipped(step: str, ragged: Federation, tmp_path: Path) -> None:
    def is_lost(node: int, message: Message) -> bool:
        head = read_head(message)
        return node in (103, 104) and head["kind"] == f"secure-{step}" and head["round"] == 2

    config = {**RUN, "algorithms": "fedavg", "groups": FIVE, "eval_every": 3}
    (secure,) = run_secure(ragged, tmp_path / "secure", lost=is_lost, **config)
    faults = secure.store.faults()
    assert {r for r, _, _ in faults} == {2}
    assert {client for _, client, _ in faults} == set(range(6))
    assert sum("no sum, and nothing is revealed" in line for line in read_log(tmp_path / "secure")) == 1
    # As if nobody had answered in this round.
    away = lambda _, message: read_head(message).get("round") == 2  # noqa: E731
    run_deployed(ragged, tmp_path / "plain", **UNDEFENDED, lost=away, **config)
    same_models(load_models(tmp_path / "plain", "fedavg"), load_models(tmp_path / "secure", "fedavg"))


def test_a_node_demands_more_participants_than_there_are(ragged: Federation, tmp_path: Path) -> None:
    lost = lambda node, message: node == 104 and read_head(message).get("round") == 2  # noqa: E731
    config = {**RUN, "algorithms": "fedavg", "groups": FIVE, "eval_every": 3}
    (result,) = run_secure(ragged, tmp_path, lost=lost, rules={"min-participants": 5}, **config)
    assert {r for r, _, _ in result.store.faults()} == {2}
    assert any("TooFewParticipantsError" in reason for _, _, reason in result.store.faults())
    assert "4 nodes are left, and this node demands 5" in (tmp_path / "state-0/error.old.log").read_text()


def test_the_server_cannot_switch_it_off(ragged: Federation, tmp_path: Path) -> None:
    own = [{"secure-aggregation": "required"}] * 3
    (result,) = run_deployed(ragged, tmp_path, algorithms="fedavg", own=own, **RUN)
    assert {reason for _, _, reason in result.store.faults()} == {
        f"node 'node-{i}' failed (SecureAggregationRequiredError; its error.log says why)" for i in range(3)
    }
    sent = [one for one in AuditLog(tmp_path / "state-0").read() if one["direction"] == "out"]
    assert {one["kind"] for one in sent} == {"hello", "failed"}


def test_a_node_without_a_key_or_with_another_roster(ragged: Federation, tmp_path: Path) -> None:
    config = {**RUN, "algorithms": "fedavg", "groups": FIVE, "rounds": 1, "eval_every": 1}
    run_secure(ragged, tmp_path, **config)
    roster = tmp_path / "keys/roster.pub"
    lines = roster.read_text().splitlines(keepends=True)
    roster.write_text("".join(lines[:4]))
    (result,) = run_secure(ragged, tmp_path, **{**config, "run-folder": str(tmp_path / "second")})
    reasons = {reason for _, _, reason in result.store.faults()}
    assert any("SessionMismatchError" in reason for reason in reasons)  # five nodes, and the roster has four
    assert "the session is of 5 nodes, and the roster has 4" in (tmp_path / "state-0/error.log").read_text()
    (tmp_path / "keys/node-1").unlink()
    roster.write_text("".join(lines))
    (result,) = run_secure(ragged, tmp_path, **{**config, "run-folder": str(tmp_path / "third")})
    assert {client for _, client, _ in result.store.faults()} == {1}
    assert "node-1: " in (text := (tmp_path / "state-1/error.log").read_text()) or "cannot read" in text


@pytest.mark.parametrize("name", ["fedmcsa", "fedamp", "fedfomo", "pfedla", "mocha", "igfl", "combined"])
def test_methods_that_need_single_uploads_are_refused(name: str, ragged: Federation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a server that knows the weights W and the mixtures W X solves for X"):
        run_secure(ragged, tmp_path, algorithms=f"local,{name}", **RUN)


def test_with_privacy_every_client_counts_one(ragged: Federation, tmp_path: Path) -> None:
    """Also in the means of BatchNorm statistics; the noise is too small to see."""
    noise = {"dp_client_noise": 1e-9, "dp_client_clip": 100.0, "dp_client_where": "local", "dp_delta": 1e-3}
    config = {**RUN, **NORMED, **noise, "rounds": 2, "bn_buffers": "average", "algorithms": "fedavg"}
    run_secure(ragged, tmp_path / "secure", **config)
    run_deployed(ragged, tmp_path / "plain", **UNDEFENDED, **config)
    same_models(load_models(tmp_path / "plain", "fedavg"), load_models(tmp_path / "secure", "fedavg"))
