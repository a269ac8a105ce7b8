"""The training loss of a deployment: nodes take it from the run's configuration, and weigh by their own rows."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done
from conformance.table import CASES
from fedattune import ConfigError, Federation
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize("name", ["fedavg", "attune"])
def test_clients_elsewhere_weigh_classes_by_their_own_rows(name: str, ragged: Federation) -> None:
    """Workers see the rows of their own clients alone, and train what a simulation trains."""
    case = next(case for case in CASES if case.name == name)
    settings = {"class_weights": "balanced", "label_smoothing": 0.1, "early_stopping": "off", "engine": "sequential"}
    here = trained(case, ragged, None, **settings)
    same_numbers(here, trained(case, ragged, Here, **settings))
    plain = trained(case, ragged, None, **(settings | {"class_weights": None}))
    assert plain.metrics["loss_uniform"] != here.metrics["loss_uniform"]


def test_nodes_of_flower_train_on_the_same_loss(ragged: Federation, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flower.runs import run_deployed, run_simulated

    loss = {"class_weights": "balanced", "label_smoothing": 0.1}
    (deployed,) = run_deployed(ragged, tmp_path, algorithm="fedavg", test=0.25, validation=0.1, **loss)
    simulated = run_simulated("fedavg", ragged, **loss)
    assert deployed.metrics["loss_uniform"] == pytest.approx(simulated.metrics["loss_uniform"], abs=1e-9)
    assert deployed.settings.loss == simulated.settings.loss


def test_a_written_deployment_has_the_loss(cli: Callable[..., Done]) -> None:
    pytest.importorskip("flwr")
    from fedattune.deploy.config import DeploymentPlan

    words = ("deploy", "write", "--data", "digits", "--clients", 4, "--nodes", 2, "--algorithms", "fedavg")
    done = cli(*words, "--out", "kit", "--loss", "focal", "--focal-gamma", 1.5, "--class-weights", "balanced")
    assert done.code == 0, done.err
    project = tomllib.loads(Path("kit/app/pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert {key: config[key] for key in ("loss", "focal-gamma", "class-weights")} == {
        "loss": "focal", "focal-gamma": 1.5, "class-weights": "balanced",
    }  # fmt: skip
    options = DeploymentPlan(config).settings(0).loss
    assert (options.name, options.focal_gamma, options.class_weights) == ("focal", 1.5, "balanced")


def test_a_loss_of_a_file_is_on_no_node(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedattune.deploy.config import DeploymentPlan

    with pytest.raises(ConfigError, match=r"own\.py:soft: nodes have no such file; write package\.module:loss"):
        DeploymentPlan({"algorithm": "fedavg", "model": "mlr", "loss": f"{tmp_path}/own.py:soft"})
    assert (
        DeploymentPlan({"algorithm": "fedavg", "model": "mlr", "loss": "torch:sum"}).settings(0).loss.name
        == "torch:sum"
    )
