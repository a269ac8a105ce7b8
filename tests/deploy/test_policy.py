"""A node's own rules: consent and limits, whatever the server asks."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import ConfigError, Federation, RunError
from fedattune.deploy.node import policy as policy_module
from fedattune.deploy.node.policy import (
    MaxRoundsError,
    MethodNotAllowedError,
    NodePolicy,
    NotApprovedError,
    approve_shared,
    read_shared,
)
from fedattune.deploy.server.backend import NodeBackend
from fedattune.training.backends.message import WorkerMessage, join_messages
from flower.in_process import InProcessGrid
from flower.runs import read_log, run_deployed


def with_rules(**rules: Any) -> type[InProcessGrid]:
    """Make a grid whose node 1 has rules."""

    class Grid(InProcessGrid):
        def __init__(self, app: Any, nodes: Any, *args: Any) -> None:
            keys = {key.replace("_", "-"): value for key, value in rules.items()}
            super().__init__(app, [{**node, **(keys if i == 1 else {})} for i, node in enumerate(nodes)], *args)

    return Grid


def test_rules_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"consent.*max-rounds"):
        NodePolicy.read({"consent": "maybe", "max-rounds": 0})
    assert NodePolicy.read({"data": "x"}) == NodePolicy()


def test_limits_of_a_message() -> None:
    rules = NodePolicy.read({"max-rounds": 3, "methods": "local, fedavg"})
    rules.check_run(["local", "fedavg"], 3)
    with pytest.raises(MaxRoundsError, match=r"asks for 4 rounds, and this node allows 3"):
        rules.check_run(["local"], 4)
    with pytest.raises(MethodNotAllowedError, match=r"'fedrep', and this node allows only local, fedavg"):
        rules.check_run(["local", "fedrep"], 1)


@pytest.mark.parametrize(
    ("rules", "kind"), [({"max_rounds": 1}, "MaxRoundsError"), ({"methods": "local"}, "MethodNotAllowedError")]
)
def test_a_run_beyond_a_limit_does_not_begin(
    rules: dict[str, Any], kind: str, ragged: Federation, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=rf"got answers of 2 nodes, expected 3: a node failed \({kind};"):
        run_deployed(ragged, tmp_path, make_grid=with_rules(**rules), algorithms="local,fedavg", rounds=2)


def test_the_server_asks_for_more_than_it_said(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that trusted the introduction alone would train every round that comes."""
    check = NodePolicy.check_run
    monkeypatch.setattr(
        policy_module.NodePolicy,
        "check_run",
        lambda self, methods, rounds: len(list(methods)) > 1 or check(self, methods, rounds),
    )
    run_deployed(ragged, tmp_path, make_grid=with_rules(max_rounds=1), algorithms="local,fedavg", rounds=2)
    log = [line for line in read_log(tmp_path) if line.startswith("round ")]
    assert set(log) == {"round 2: node 'node-1' failed (MaxRoundsError; its error.log says why)"}


def test_a_server_that_repeats_a_round_trains_no_more_than_that(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives every training the number of the first round."""
    monkeypatch.setattr(NodePolicy, "check_run", lambda *_: None)
    run_deployed(ragged, tmp_path, make_grid=with_rules(max_rounds=1), algorithms="fedavg", rounds=4)
    log = [line for line in read_log(tmp_path) if "MaxRoundsError" in line and line[0] == "r"]
    assert [line.partition(":")[0] for line in log] == ["round 3", "round 4"]
    count = tmp_path / "state-1" / "current" / "fedavg" / "seed-0" / "trained.json"
    assert json.loads(count.read_text()) == {"rounds": 2}


@pytest.mark.parametrize("kinds", [["state"], ["models"], ["keep"], ["evaluate", "models"], ["evaluate", "several"]])
def test_a_server_cannot_ask_for_the_models_of_clients(
    kinds: list[str], ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = NodeBackend.make_evaluation

    def ask(self: NodeBackend, *args: Any) -> dict[int, WorkerMessage]:
        return {
            i: join_messages([WorkerMessage({**one.head, "kind": kind, "load": False}) for kind in kinds])
            for i, one in make(self, *args).items()
        }

    monkeypatch.setattr(NodeBackend, "make_evaluation", ask)
    run_deployed(ragged, tmp_path, algorithms="fedrep", rounds=1)
    assert sum("failed (ConfigError" in line for line in read_log(tmp_path)) >= 3
    assert "a node only trains and evaluates" in (tmp_path / "state-1" / "error.log").read_text()


def test_consent_is_for_exactly_this_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask, given = NodePolicy.read({"consent": "ask"}), NodePolicy()
    with pytest.raises(RunError, match="the node writes it when the server asks"):
        read_shared(tmp_path)
    given.check_consent(tmp_path, {"clients": ["ä"]})
    assert '"ä"' in (tmp_path / "shared.json").read_text(encoding="utf-8")
    assert '"ä"' in capsys.readouterr().out
    given.check_consent(tmp_path, {"clients": ["ä"]})
    assert capsys.readouterr().out == ""  # the log has it once
    with pytest.raises(NotApprovedError, match="fedattune node approve"):
        ask.check_consent(tmp_path, {"clients": ["ä"]})
    approve_shared(tmp_path, read_shared(tmp_path)[0])
    ask.check_consent(tmp_path, {"clients": ["ä"]})
    with pytest.raises(NotApprovedError):
        ask.check_consent(tmp_path, {"clients": ["ä", "b"]})
    (tmp_path / "approved.json").write_text("{")
    with pytest.raises(NotApprovedError):
        ask.check_consent(tmp_path, {"clients": ["ä"]})


def test_a_node_that_asks_waits_for_approval(ragged: Federation, tmp_path: Path) -> None:
    grid = with_rules(consent="ask")
    with pytest.raises(RunError, match=r"a node failed \(NotApprovedError"):
        run_deployed(ragged, tmp_path, make_grid=grid, algorithms="fedavg", rounds=1)
    shared = json.loads((tmp_path / "state-1" / "shared.json").read_text())
    assert [one["name"] for one in shared["clients"]] == ["1", "2", "4"]
    assert shared["schema"]["classes"]
    approve_shared(tmp_path / "state-1", read_shared(tmp_path / "state-1")[0])
    (result,) = run_deployed(ragged, tmp_path, make_grid=grid, algorithms="fedavg", rounds=1)
    assert result.metrics
