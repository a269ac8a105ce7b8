"""A node's answers to single messages of a malicious server, and its secrets on the disk."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune.core.errors import ConfigError
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.deploy.node.policy import NodePolicy
from fedattune.deploy.secagg import AlreadySummedError, SessionMismatchError, TamperedShareError, keys
from fedattune.deploy.secagg.layout import plan_blocks, plan_part
from fedattune.deploy.secagg.methods import check_secure_node
from fedattune.deploy.secagg.ring import dequantize
from fedattune.deploy.secagg.runtime import STATE_NAME, SecureSteps, read_rules
from fedattune.deploy.secagg.session import ServerSession, Session
from fedattune.training.backends.local import LocalBackend
from fedattune.training.backends.message import WorkerMessage, join_messages
from flower.certificates import write_node_keys

W = torch.tensor([0.5, -1.25, 3.0])
KEY = {"token": "00000000", "algorithm": "fedavg", "seed": 0, "model": "m", "configuration": "c" * 64}


class Federation:
    """Three nodes with two clients each, whose uploads are made up; the server may lie."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, 0
        self.reply: dict[str, Any] = {}  # in place of what nodes would reply
        self.configs = write_node_keys(folder / "keys", 3)
        self.steps = []
        for i, config in enumerate(self.configs):
            (folder / f"state-{i}").mkdir()
            rules = read_rules(NodePolicy.read(config))
            self.steps.append(SecureSteps(folder / f"state-{i}", rules, {"params": "samples"}, 24, 16.0, "c" * 64))
        self.ids = [read_rules(NodePolicy.read(config)).id for config in self.configs]
        self.begin(3)

    def begin(self, r: int, **changes: Any) -> None:
        self.round, self.numbers = r, self.numbers + 1
        values: dict[str, Any] = {
            **KEY, "round": r, "number": [1, self.numbers], "bits": 24, "clip": 16.0, "nodes": 3,
            "parts": [plan_part(self.work(0))],
            "blocks": plan_blocks(0, "train", 3, has_scores=False),
        }  # fmt: skip
        self.session = Session(**{**values, **changes})
        self.server = ServerSession(self.session)

    def work(self, i: int, w: torch.Tensor = W) -> WorkerMessage:
        """The server's message to a node: train both clients from w."""
        mine = [2 * i, 2 * i + 1]
        message = WorkerMessage(
            {
                **KEY, "kind": "train", "round": self.round, "update_server": True, "should_evaluate": False, "part": 0,
                "ids": mine, "cohort": mine, "dropouts": [], "resting": [], "replies_immediately": False,
            }
        )  # fmt: skip
        message.put("sent", Payload(Params(w=w.expand(2, -1))))
        return message

    def ask(self, step: str, i: int, content: Mapping[str, Any], work: WorkerMessage | None = None) -> Any:
        head = {**KEY, "kind": f"secure-{step}", "round": self.round, "number": list(self.session.number)}
        message = WorkerMessage({**head, "session": self.session.digest, **content}, work.tensors if work else {})

        def train(inner: WorkerMessage) -> tuple[LocalBackend, WorkerMessage]:
            ids = inner.head["ids"]
            told = {"kind": "trained", "ids": ids, "n_trained": len(ids), "steps": 6, "diverged": []}
            reply = WorkerMessage({**told, **self.reply})
            rows = torch.stack([W * (client + 1) / 10 for client in reply.head["ids"]])
            reply.put("upload", Payload(Params(w=rows)))
            context = SimpleNamespace(n_train=torch.tensor([1, 2, 3, 4, 5, 6]))
            backend = SimpleNamespace(context=context, evaluation=SimpleNamespace(eval_ids=torch.tensor(ids)))
            return cast(LocalBackend, backend), reply

        return self.steps[i].answer(message, train)

    def agree(self, i: int, **changes: Any) -> None:
        content = {"session": self.session.model_dump(), "contributes": [True], **changes}
        self.server.add_advert(self.ask("keys", i, content).head["advert"], content["contributes"], f"node-{i}")

    def share(self, i: int) -> None:
        told = self.ask("shares", i, {"adverts": [a.to_json() for a in self.server.adverts.values()]}).head
        self.server.add_shares(self.ids[i], told["threshold"], told["shares"])

    def collect(self, i: int, work: WorkerMessage | None = None, **changes: Any) -> None:
        work = work or self.work(i)
        content = {"shares": self.server.select_shares(self.ids[i]), "inner": work.head, **changes}
        reply = self.ask("masked", i, content, work)
        self.server.add_masked(self.ids[i], reply.tensors["masked"].numpy().view("uint64"), reply.head["unfit"])

    def sign(self, i: int) -> None:
        lists = {"survivors": self.server.survivors, "dropped": self.server.dropped}
        self.server.add_signature(self.ids[i], self.ask("survivors", i, lists).head["signature"])

    def unmask(self, i: int) -> None:
        told = self.ask("unmask", i, {"signatures": self.server.signatures}).head["masks"]
        self.server.add_shares_of_masks(self.ids[i], told)

    def run(self, *steps: str) -> None:
        for step in steps or ("agree", "share", "collect", "sign", "unmask"):
            for i in range(3):
                getattr(self, step)(i)

    def has_secrets(self, i: int) -> bool:
        return (self.folder / f"state-{i}" / STATE_NAME).exists()


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


def test_a_session_from_message_to_message(federation: Federation) -> None:
    federation.run("agree")
    mode = (federation.folder / "state-0" / STATE_NAME).stat().st_mode & 0o777
    assert os.name != "posix" or mode == 0o600
    federation.run("share", "collect", "sign", "unmask")
    total = federation.server.finish()
    # clients, samples, trained, steps, diverged; then the sum of samples times models.
    assert total[:5].tolist() == [6, 21, 6, 18, 0]
    weighted = sum(n * n for n in range(1, 7)) / 10 * W
    torch.testing.assert_close(torch.from_numpy(dequantize(total[5:], 24)).float(), weighted)
    assert not any(federation.has_secrets(i) for i in range(3))


def test_the_same_round_is_summed_once(federation: Federation) -> None:
    federation.run("agree", "share", "collect")
    federation.begin(3)  # nothing was signed, so nothing can be known of the first one
    federation.run("agree", "share", "collect", "sign")
    federation.begin(3)
    with pytest.raises(AlreadySummedError, match="round 3 was summed before"):
        federation.agree(0)
    federation.begin(2)
    with pytest.raises(AlreadySummedError):
        federation.agree(0)
    federation.begin(4)
    federation.run()
    federation.server.finish()


@pytest.mark.parametrize("what", ["parts", "blocks"])
def test_a_session_sums_nothing_twice(what: str, federation: Federation) -> None:
    """The second sum of a round could lack one node, whose upload would be the difference."""
    values = federation.session.model_dump()
    twice = {"parts": values["parts"] * 2, "blocks": values["blocks"] + plan_blocks(1, "train", 3, has_scores=False)}
    changes = twice if what == "parts" else {"blocks": values["blocks"] * 2}
    content = {"session": {**values, **changes}, "contributes": [True, True]}
    with pytest.raises(SessionMismatchError, match="repeat a kind and round"):
        federation.ask("keys", 0, content)
    assert not federation.has_secrets(0)


def test_a_part_of_a_session_is_done_once(federation: Federation) -> None:
    federation.run("agree", "share")
    twice = join_messages([federation.work(0), federation.work(0)])
    twice.head.update(KEY)
    with pytest.raises(SessionMismatchError, match="other parts than the session"):
        federation.collect(0, twice)


def test_clients_that_do_not_upload_as_was_signed(federation: Federation) -> None:
    """Whatever makes a client add zeros, the node that signed that it contributes leaves the session."""
    federation.run("agree", "share")
    federation.reply = {"ids": [2], "n_trained": 1}
    with pytest.raises(SessionMismatchError, match=r"round 3: clients \[2\] of this node uploaded, expected \[2, 3\]"):
        federation.collect(1)
    assert not federation.has_secrets(1)
    federation.reply = {"ids": [4], "n_trained": 1, "diverged": [5]}
    federation.collect(2)


def test_a_server_that_sends_one_node_another_model(federation: Federation) -> None:
    """With another model, such as one whose units never fire, the server could tell a node's upload from the sum."""
    federation.run("agree", "share")
    with pytest.raises(SessionMismatchError, match="the server sends this node another model"):
        federation.collect(1, federation.work(1, W + 1))
    assert not federation.has_secrets(1)
    with pytest.raises(SessionMismatchError, match="is in no session"):
        federation.collect(1)


def test_a_server_that_sends_the_clients_of_a_node_different_models(federation: Federation) -> None:
    federation.run("agree", "share")
    work = federation.work(0)
    work.tensors["sent/params/w"] = torch.stack([W, W + 1])
    with pytest.raises(SessionMismatchError, match="the clients of this node different models"):
        federation.collect(0, work)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cohort": []}, "counted the node's clients in another sum"),
        ({"round": 2}, "of another round"),
        ({"should_evaluate": True}, "another model, or other orders"),
        ({"part": 1}, "other parts than the session"),
        ({"pending": [0]}, "other parts than the session"),
        ({"token": "11111111"}, "another token"),
    ],
)
def test_work_that_is_not_the_session_s(change: dict[str, Any], text: str, federation: Federation) -> None:
    federation.run("agree", "share")
    work = federation.work(0)
    work.head.update(change)
    with pytest.raises(SessionMismatchError, match=text):
        federation.collect(0, work)


def test_a_session_of_another_run_configuration(federation: Federation) -> None:
    """With a tiny learning rate for the others, a sum would be the upload of the one that got the real rate."""
    federation.begin(4, configuration="d" * 64)
    content = {"session": federation.session.model_dump(), "contributes": [True], "configuration": "d" * 64}
    with pytest.raises(SessionMismatchError, match="of a run configuration that this node did not get"):
        federation.ask("keys", 0, content)


def test_messages_of_another_session(federation: Federation) -> None:
    federation.run("agree", "share", "collect")
    first = federation.session
    federation.session = first.model_copy(update={"number": [1, 50]})
    with pytest.raises(SessionMismatchError, match="belongs to another session"):
        federation.sign(0)


def test_an_error_ends_the_session_and_deletes_its_secrets(federation: Federation) -> None:
    federation.run("agree", "share")
    with pytest.raises(TamperedShareError):
        federation.collect(0, shares=dict.fromkeys(federation.ids, "AAAA"))
    assert not federation.has_secrets(0)
    (federation.folder / "state-2" / STATE_NAME).write_text("{")
    with pytest.raises(SessionMismatchError, match="has lost its state"):
        federation.collect(2)


# Files of a node.


def make_policy(config: Mapping[str, Any], **more: Any) -> NodePolicy:
    return NodePolicy.read({**config, "secure-aggregation": "required", **more})


def test_rosters_and_keys_that_cannot_be_read(tmp_path: Path) -> None:
    config = write_node_keys(tmp_path, 3)[0]
    roster = Path(config["roster"])
    lines = roster.read_text().splitlines(keepends=True)
    for text, sentence in (
        ("", "has no public key"),
        ("ssh-rsa AAAA x\n", "line 1 of"),
        ("".join([*lines, lines[0]]), "line 4 of .* repeats a key or a name"),
        (lines[0] + lines[1].replace("node-1", "node-0"), "line 2 of .* repeats a key or a name"),
        (
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIK0wmN/Cr3JXqmLW7u+g9pTh+wyqDHpSQEIQczXkVx9 e\n",
            "line 1 of .* is not on a NIST curve",
        ),
    ):
        roster.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            keys.read_roster(roster)
    roster.write_text("# all nodes\n\n" + "".join(lines))
    assert [one.name for one in keys.read_roster(roster).values()] == ["node-0", "node-1", "node-2"]
    with pytest.raises(ConfigError, match="cannot read"):
        keys.read_roster(tmp_path / "none")
    with pytest.raises(ConfigError, match="needs `key`"):
        read_rules(NodePolicy.read({}))
    for content in (b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"):
        Path(config["key"]).write_bytes(content)
        with pytest.raises(ConfigError, match="no private key"):
            read_rules(make_policy(config))


@pytest.mark.parametrize("change", [{"min-participants": 2}, {"threshold": 0.5}, {"threshold": 0.66}, {"threshold": 1}])
def test_rules_that_protect_nothing(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the node's configuration"):
        NodePolicy.read(change)


def test_a_threshold_below_two_thirds_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        NodePolicy.read({"threshold": 0.5})
    assert str(caught.value) == (
        "the node's configuration: threshold: expected 2/3 (0.6667) at least: with less, a server that shows nodes two "
        "lists of survivors opens a node's upload with the help of less than a third of the nodes, got 0.5"
    )
    assert NodePolicy.read({"threshold": 0.6667}).threshold == 0.6667


def test_the_check_of_a_node(tmp_path: Path) -> None:
    config = write_node_keys(tmp_path, 5)[0]

    def check(policy: NodePolicy, is_asked: bool | None = True) -> list[tuple[str, str]]:
        run = {} if is_asked is None else {"secure-aggregation": is_asked}
        return [(one.state, one.value) for one in check_secure_node(policy, tmp_path, run)]

    ((state, text),) = check(make_policy(config))
    assert state == "ok"
    assert "a sum of all needs 4 of them, and survives the loss of 1" in text
    assert "a lying server and 1 of them learn sums over the others only" in text
    ((_, text),) = check(make_policy(config, **{"min-participants": 4}))
    assert "a lying server and 2 of them learn sums over the others only" in text
    assert [state for state, _ in check(NodePolicy.read(config))] == ["note", "ok"]
    assert check(NodePolicy.read({}), None) == []
    assert check(NodePolicy.read({}), False) == []
    assert "makes none" in check(make_policy(config), False)[0][1]
    assert check(make_policy(config), None)[0][0] == "ok"
    assert "names no `key`" in check(NodePolicy.read({"secure-aggregation": "required"}))[0][1]
    assert "expected 6 to 49" in check(make_policy(config, **{"min-participants": 6}))[0][1]
    roster = Path(config["roster"])
    roster.write_text("".join(roster.read_text().splitlines(keepends=True)[1:]))
    assert "is not in" in check(make_policy(config))[0][1]
    roster.write_text("?")
    assert check(make_policy(config))[0][0] == "broken"


def test_the_state_on_the_disk_holds_no_upload(federation: Federation) -> None:
    federation.run("agree", "share", "collect")
    text = (federation.folder / "state-0" / STATE_NAME).read_text()
    assert json.loads(text).keys() == {"session", "step", "secrets", "adverts", "shares", "survivors"}
