"""Attacks are simulations; over nodes in one process, they are the same as in the simulator."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs Flower")

import fedattune
from fedattune import ConfigError, Federation
from fedattune.deploy import config
from fedattune.deploy.config import DeploymentPlan
from flower.runs import read_log, run_deployed, run_simulated


def test_a_deployment_takes_no_attack() -> None:
    with pytest.raises(ConfigError, match="attack is for simulations"):
        DeploymentPlan({"algorithm": "fedavg", "model": "mlr", "attack": "ipm"})


@pytest.mark.parametrize(
    ("name", "attack"), [("fedavg", "negated_update"), ("fedmcsa", "label_flip_count"), ("fedmcsa", "alie")]
)
def test_nodes_of_flower_give_the_same(
    name: str, attack: str, ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a test can attack over nodes: both ends draw the attackers from the split's seed."""
    allowed = config.SIMULATION_OPTIONS - {"attack", "attackers"}
    monkeypatch.setattr(config, "SIMULATION_OPTIONS", allowed)
    (deployed,) = run_deployed(ragged, tmp_path, algorithm=name, attack=attack, attackers=2, test=0.25, validation=0.1)
    simulated = run_simulated(name, ragged, attack=attack, attackers=2)
    assert deployed.metrics["loss_uniform"] == pytest.approx(simulated.metrics["loss_uniform"], abs=1e-9)
    for key in ("name", "attackers"):  # labels stay at the nodes
        assert deployed.facts["attack"][key] == simulated.facts["attack"][key]


@pytest.mark.parametrize("name", ["fedmcsa", "fedrep"])
def test_nodes_refuse_the_same(name: str, ragged: Federation, tmp_path: Path) -> None:
    (deployed,) = run_deployed(ragged, tmp_path, algorithm=name, accept="better", test=0.25, validation=0.1)
    simulated = run_simulated(name, ragged, accept="better")
    assert deployed.metrics["loss_uniform"] == pytest.approx(simulated.metrics["loss_uniform"], abs=1e-9)
    assert deployed.facts["refusals"] == simulated.facts["refusals"]
    assert deployed.facts["refusals"]["clients"]


@pytest.mark.parametrize(
    ("name", "screening", "fact"),
    [("fedavg", "on", "rejected"), ("pfedla", "on", "quarantined"), ("fedavg", "groups", "")],
)
def test_a_client_that_codes_its_labels_otherwise_is_named(
    name: str, screening: str, fact: str, tmp_path: Path
) -> None:
    """No attack: one of nine hospitals has its codes the wrong way round, and the server learns it from updates."""
    data = fedattune.load_federation("digits", partition="dirichlet", clients=9)
    y = data.y.clone()
    for part in ("train", "validation", "test"):
        rows = data.part(part)[4]
        y[rows] = 9 - y[rows]
    (run,) = run_deployed(
        replace(data, y=y),
        tmp_path,
        groups=[range(3), range(3, 6), range(6, 9)],
        algorithm=name,
        model="mlr",
        rounds=6,
        lr=0.05,
        steps=20,
        cohort=1.0,
        screening=screening,
        test=0.25,
        validation=0.1,
    )
    report = run.reports.get("screening", {})
    found = {key: list(report[key]) for key in ("rejected", "quarantined") if key in report}
    assert found == ({fact: ["4"]} if fact else {})
    assert any("classes look like other classes" in note for note in run.notes) is bool(fact)
    logged = [line for line in read_log(tmp_path) if "client '4'" in line and "other classes" in line]
    assert bool(logged) is bool(fact)
    assert len(logged) == 1 or fact != "quarantined"
