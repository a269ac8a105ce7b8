"""Client-level privacy at real nodes: noise from the operating system, counted uploads, and rules of a node."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune import ConfigError, Federation, RunError
from fedattune.core.settings import Settings
from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.deploy.node.policy import NodePolicy, PrivacyBudgetError, PrivacyRequiredError
from fedattune.deploy.server import server_app
from fedattune.privacy.accounting import epsilon_of
from fedattune.training.uploads import client_privacy as clients
from fedattune.training.uploads.client_privacy import UploadAccounting
from flower.in_process import InProcessGrid
from flower.runs import GROUPS, read_log, run_deployed
from flower.spoiling import SPOILT

DP: dict[str, Any] = {"dp_client": 20.0, "dp_delta": 1e-3, "rounds": 3, "cohort": 1.0}


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa"])
@pytest.mark.parametrize("where", ["central", "local"])
def test_a_deployed_run_spends_its_budget(
    name: str, where: str, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All noise comes from the operating system, at the place that the run names."""
    callers: list[bool] = []

    def record(self: clients.ClientPrivacy, *arguments: Any) -> Any:
        callers.append(self.is_secret)
        return protect(self, *arguments)

    protect = clients.ClientPrivacy.protect
    monkeypatch.setattr(clients.ClientPrivacy, "protect", record)
    monkeypatch.setattr(clients, "draw_seeded", None)
    (result,) = run_deployed(ragged, tmp_path, algorithm=name, dp_client_where=where, **DP)
    assert callers == [True] * (3 if where == "central" else 3 * len(GROUPS))
    privacy = result.reports["client_privacy"]
    assert privacy is not None
    assert privacy["generator"] == "the operating system"
    assert 19 < privacy["epsilon"] <= 20
    assert privacy["epsilon"] == epsilon_of(privacy["noise_multiplier"], 1, 3, 1e-3, sampling="none")
    counts = {file.resolve() for file in tmp_path.glob("state-*/*/*/seed-0/uploads.json")}
    assert [json.loads(file.read_text()) for file in counts] == [{"uploads": 3}] * (3 if where == "local" else 0)
    assert not read_log(tmp_path).count("refused")


@pytest.mark.parametrize("name", ["ifca", "fedlc"])
def test_methods_without_record_privacy_are_refused_as_in_a_simulation(
    name: str, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the server, and by the nodes of a server that does not check."""
    settings = {"dp_record": 1.0, "rounds": 1, "dp_delta": 1e-3, "cohort": 1.0}
    with pytest.raises(ConfigError, match=rf"{name}: record-level differential privacy .* cannot go with this"):
        run_deployed(ragged, tmp_path / "a", algorithm=f"fedavg,{name}", **settings)
    assert not (tmp_path / "a" / "run" / "fedavg").exists()  # before the other method trains
    monkeypatch.setattr(server_app, "check_methods", lambda *_: None)
    (result,) = run_deployed(ragged, tmp_path / "b", algorithm=name, start_timeout=0.2, **settings)
    faults = [why for r, _, why in result.store.faults() if r == 1]
    assert len(faults) == 6
    assert all("ConfigError" in why for why in faults)
    assert "record-level differential privacy (--dp-record) cannot go with this" in capsys.readouterr().out


def test_whole_numbers_train_with_private_rows(ragged: Federation, tmp_path: Path) -> None:
    """The check at a node sees inputs as the model does."""
    data = replace(ragged, x=(ragged.x * 10).long())
    (result,) = run_deployed(data, tmp_path, algorithm="fedavg", rounds=1, cohort=1.0, dp_record=5.0, dp_delta=1e-3)
    assert not result.store.faults()


def test_noise_at_nodes_is_never_the_same(ragged: Federation, tmp_path: Path) -> None:
    one, two = (
        run_deployed(ragged, tmp_path / part, algorithm="fedavg", dp_client_where="local", **DP)[0]
        for part in ("one", "two")
    )
    assert one.metrics != two.metrics


def test_a_lost_reply_spends_the_budget_of_a_node(ragged: Federation, tmp_path: Path) -> None:
    """The server is told of no upload beyond the budget, whatever it asks for."""
    run_deployed(ragged, tmp_path, algorithm="fedavg", dp_client_where="local", **DP)
    (file,) = {file.resolve() for file in tmp_path.glob("state-1/*/*/seed-0/uploads.json")}
    file.write_text(json.dumps({"uploads": 4}))
    accounting = UploadAccounting(Settings(**DP), 6, is_sum=False, is_secret=True)
    with pytest.raises(PrivacyBudgetError, match=r"noised upload 5 .* dp-client 20 allows 3"):
        NodePolicy.count_uploads(file.parent, 1, accounting)
    assert json.loads(file.read_text()) == {"uploads": 4}
    file.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        NodePolicy.count_uploads(file.parent, 1, accounting)


def test_a_node_that_asks_for_noise_takes_no_part_without(ragged: Federation, tmp_path: Path) -> None:
    class Grid(InProcessGrid):
        def __init__(self, app: Any, nodes: Any, *rest: Any) -> None:
            super().__init__(app, [{**node, "max-epsilon": 20} for node in nodes], *rest)

    with pytest.raises(RunError, match="PrivacyRequiredError"):
        run_deployed(ragged, tmp_path / "a", algorithm="fedavg", make_grid=Grid, start_timeout=0.2, **DP)
    (result,) = run_deployed(ragged, tmp_path / "b", algorithm="fedavg", make_grid=Grid, dp_client_where="local", **DP)
    assert result.is_finished


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dp_client": 1.0},
        {"dp_client": 3.0, "dp_client_where": "local"},
        {"dp_client": 1.0, "dp_client_where": "local", "dp_delta": 0.1},
        {"dp_client_noise": 5.0, "dp_client_where": "local"},
    ],
)
def test_the_rule_of_a_node(settings: dict[str, Any]) -> None:
    policy = NodePolicy.read({"max-epsilon": 2.0})
    policy.check_privacy(Settings(dp_client=1.0, dp_client_where="local", dp_delta=1e-4))
    with pytest.raises(PrivacyRequiredError, match="max-epsilon 2"):
        policy.check_privacy(Settings(**settings))
    NodePolicy().check_privacy(Settings(**settings))


def test_a_server_that_starts_again_counts_the_round_twice(ragged: Federation, tmp_path: Path) -> None:
    """The server was killed after it sent a model: clients saw this round's noise, and see it with other noise."""

    class Killed(BaseException):
        pass

    class Grid(InProcessGrid):
        n = 0

        def push_messages(self, messages: Any) -> Any:
            type(self).n += 1
            if type(self).n == 4:
                raise Killed
            return super().push_messages(messages)

    with pytest.raises(Killed):
        run_deployed(ragged, tmp_path, algorithm="fedavg", make_grid=Grid, **DP)
    (result,) = run_deployed(ragged, tmp_path, algorithm="fedavg", **DP)
    privacy = result.reports["client_privacy"]
    assert privacy is not None
    assert privacy["repeated_rounds"] == 1
    assert privacy["epsilon"] == epsilon_of(privacy["noise_multiplier"], 1, 4, 1e-3, sampling="none")
    assert privacy["epsilon"] > 20


ORDERS: dict[str, dict[str, Any]] = {
    "nobody's cohort": {"cohort": [0] * 6},
    "repeated": {"ids": [1] * 400, "cohort": [1]},
    "fractions": {"dropouts": [1.5]},
    "truth": {"ids": [True, 2, 4]},
    "others": {"cohort": [0, 1, 2, 4]},
    "order": {"ids": [2, 1, 4]},
    "no list": {"cohort": {"1": 1}},
}


@pytest.mark.parametrize("kind", ORDERS)
def test_orders_that_name_other_clients_are_refused_before_they_are_counted(
    kind: str, ragged: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a server has uploads made that the node does not count."""

    class Grid(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            for message in messages:
                order = unpack_record(message.content)
                if message.metadata.dst_node_id == SPOILT and order.head["kind"] == "train":
                    order.head.update(ORDERS[kind])
                    message.content = pack_record(order)
            return super().push_messages(messages)

    config = {**DP, "rounds": 1, "make_grid": Grid}
    (result,) = run_deployed(ragged, tmp_path, algorithm="fedavg", dp_client_where="local", **config)
    faults = result.store.faults()
    assert {client for _, client, _ in faults} == {1, 2, 4}
    assert all("ConfigError" in why for _, _, why in faults)
    assert not list(tmp_path.glob("state-1/*/*/seed-0/uploads.json"))
    assert "expected a sorted list of different clients of this node, which are [1, 2, 4]" in capsys.readouterr().out
