"""The optimizer of a deployment: nodes take it from the run's configuration, and keep its state themselves."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done, refused
from conformance.table import CASES
from fedattune import Federation
from fedattune.core.optimizers import Adam
from fedattune.training.setup import make_optimizer, make_schedule
from remote_runs import Here, same_numbers, trained

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_clients_elsewhere_keep_their_moments(name: str, ragged: Federation) -> None:
    case = next(case for case in CASES if case.name == name)
    settings = {
        "optimizer": "adamw", "lr": 0.01, "optimizer_state": "keep", "lr_schedule": "cosine", "lr_warmup": 1,
        "max_grad_norm": 0.5, "early_stopping": "off", "engine": "sequential",
    }  # fmt: skip
    here = trained(case, ragged, None, **settings)
    same_numbers(here, trained(case, ragged, Here, **settings))
    restarted = trained(case, ragged, None, **(settings | {"optimizer_state": "restart"}))
    assert restarted.metrics["loss_uniform"] != here.metrics["loss_uniform"]


def test_a_written_deployment_has_the_optimizer(cli: Callable[..., Done]) -> None:
    pytest.importorskip("flwr")
    from fedattune.deploy.config import DeploymentPlan

    words = ("deploy", "write", "--data", "digits", "--clients", 4, "--nodes", 2)
    options = ("--optimizer", "adam", "--beta2", 0.99, "--lr-schedule", "step", "--rounds", 9, "--max-grad-norm", 2)
    done = cli(*words, "--algorithms", "fedavg", "--out", "kit", *options)
    assert done.code == 0, done.err
    config = tomllib.loads(Path("kit/app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert (config["optimizer"], config["beta2"], config["lr"], config["max-grad-norm"]) == ("adam", 0.99, 0.001, 2)
    plan = DeploymentPlan(config)
    settings, schedule = plan.settings(0), make_schedule(plan.settings(0))
    assert make_optimizer(plan.algorithms["fedavg"], settings) == Adam(beta2=0.99)
    assert schedule is not None
    assert (schedule.kind, schedule.step_size) == ("step", 3)
    refused(cli(*words, "--algorithms", "scaffold", "--out", "other", "--momentum", 0.9), "local steps of its own")
