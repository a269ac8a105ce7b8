"""`fedattune node`: check a node, approve what it tells, and show what left it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from cli_helpers import Done
from fedattune.deploy.node.policy import NodePolicy, NotApprovedError
from fedattune.deploy.operate.audit import AuditLog
from fedattune.training.backends.message import WorkerMessage

Cli = Callable[..., Done]


@pytest.fixture
def node(work: Path) -> Path:
    """A node's configuration, with a log of two messages in its state."""
    file = work / "nodes" / "0.toml"
    file.parent.mkdir()
    file.write_text('data = "none.csv"\nname = "a"\n')
    log = AuditLog(work / "state" / "node-0")
    head: dict[str, Any] = {"kind": "hello"}
    log.append("in", WorkerMessage(head), head)
    log.append("out", WorkerMessage({"kind": "hello", "clients": [{"name": "ward"}], "schema": "{}"}), head)
    return file


def test_the_log_is_shown_and_verified(cli: Cli, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("node", "audit", node)
    assert (done.code, done.err) == (0, "")
    assert "The node tells the names and sizes of its clients" in done.out
    assert "The chain of 2 lines is whole." in done.out
    for place in ("state/node-0", None):  # the folder itself, and what the node's own process would take
        monkeypatch.setenv("FEDATTUNE_STATE", "state/node-0")
        done = cli("node", "audit", *([place] if place else []), "--json")
        content = json.loads(done.out)
        assert content["problem"] is None
        assert content["lines"][1]["clients"] == ["ward"]


def test_a_changed_log_ends_with_a_sentence(cli: Cli, node: Path, work: Path) -> None:
    file = work / "state" / "node-0" / "audit.jsonl"
    text = file.read_text()
    file.write_text(text.replace("ward", "wart"))
    done = cli("node", "audit", node)
    assert done.code == 1
    assert "The log is not as the node wrote it: line 2 was changed" in done.out
    file.write_text(text.splitlines(keepends=True)[0])
    done = cli("node", "audit", node, "--json")
    assert done.code == 1
    assert json.loads(done.out)["problem"] == "lines 2 to 2 were cut off the end"
    file.unlink()
    done = cli("node", "audit", node)
    assert done.code == 2
    assert "cannot read the audit log" in done.err


def test_text_of_the_server_cannot_steer_the_terminal(cli: Cli, node: Path, work: Path) -> None:
    evil = "\x1b[2J\x9b1m\nThe chain of 9 lines is whole.\u202e"
    head = {"kind": evil, "token": evil, "algorithm": evil, "round": evil}
    AuditLog(work / "state" / "node-0").append("in", WorkerMessage(head), head)
    done = cli("node", "audit", node)
    assert done.code == 0
    assert not set("\x1b\x9b\u202e") & set(done.out)
    assert "\nThe chain of 9" not in done.out
    assert "\\x1b[2J\\x9b1m\\nThe chain of 9" in done.out
    assert "\x1b" not in cli("node", "audit", node, "--json").out


def test_approval(cli: Cli, node: Path, work: Path) -> None:
    state, ask = work / "state" / "node-0", NodePolicy.read({"consent": "ask"})
    done = cli("node", "approve", node)
    assert done.code == 2
    assert "the node writes it when the server asks" in done.err
    with pytest.raises(NotApprovedError):
        ask.check_consent(state, {"clients": ["ward"]})
    done = cli("node", "approve", node)
    assert done.code == 2
    assert "--digest: got nothing, expected " in done.err
    digest = done.out.rpartition("SHA-256 ")[2].strip()
    with pytest.raises(NotApprovedError):
        ask.check_consent(state, {"clients": ["ward", "other"]})  # another run changes the text
    done = cli("node", "approve", node, "--digest", digest)
    assert done.code == 2
    assert '"other"' in done.out
    with pytest.raises(NotApprovedError):
        ask.check_consent(state, {"clients": ["ward"]})
    done = cli("node", "approve", node, "--digest", digest)
    assert done.code == 0
    assert '"ward"' in done.out
    assert "Approved: the node may tell the server exactly this." in done.out
    ask.check_consent(state, {"clients": ["ward"]})


def test_a_check_names_what_is_wrong(cli: Cli, node: Path) -> None:
    done = cli("node", "check", node)
    assert done.code == 1
    assert "!!  data: " in done.out
    assert "there is no file or folder 'none.csv'" in " ".join(done.out.split())
    assert "The node is not ready: data, key, authority;" in done.out
    done = cli("node", "check", node, "--json")
    assert done.code == 1
    assert json.loads(done.out)["ready"] is False
