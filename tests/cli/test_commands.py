"""What the commands print and write when all is well."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_helpers import Done
from fedattune.cli import main

Cli = Callable[..., Done]
METRICS = {"acc_uniform", "acc_pooled", "acc_std", "acc_worst10", "loss_uniform"}
FAST = ("--rounds", 4, "--steps", 5, "--clients", 5)


def check_run(run: dict[str, Any]) -> None:
    """The JSON of a run as other tools expect it."""
    assert {"algorithm", "config", "rounds", "n_parameters", "seconds", "history", "clients"} <= run.keys()
    assert set(run["bytes"]) == {"up", "down"}
    for values in (run["final"]["received"], run["final"]["trained"], run["best_test"], run["best_validation"]):
        assert values.keys() >= METRICS
        assert 0 <= values["acc_uniform"] <= 1
    assert run["mean_last_10pct"].keys() >= METRICS
    for client in run["clients"]:
        assert client.keys() >= {"id", "n_train", "n_test", "received", "trained"}


def test_help_and_version(cli: Cli) -> None:
    done = cli("compare", "--help-all")
    assert done.code == 0
    assert "--help-all shows all" not in done.out
    options = (
        "config data partition clients model algorithm algorithms set rounds cohort steps epochs batch-size lr "
        "weight-decay seed seeds engine device eval-every out json resume quiet data-dir client-column target"
    )
    for option in options.split():
        assert f" --{option} " in done.out
    assert re.fullmatch(r"fedattune \d+\.\d+\.\d+\S*\n", cli("--version").out)


@pytest.mark.parametrize("command", ["compare", "run", "deploy write"])
def test_help_shows_at_most_25_common_options(cli: Cli, command: str) -> None:
    done = cli(*command.split(), "--help")
    assert done.code == 0
    assert re.search(r"--help-all shows all\s+\d{2,3}\.\s*$", done.out)
    assert len(re.findall(r"^  -", done.out, re.MULTILINE)) <= 25 + len(("--help", "--help-all"))
    assert "--lr X" in done.out
    assert "--dp-client-where" not in done.out


def test_help_gives_each_default_once(cli: Cli) -> None:
    text = " ".join(cli("compare", "--help-all").out.split())
    assert "local learning rate (default: 0.02; with adam and adamw, 0.001) --" in text
    assert "methods whose clients run SGD (default: sgd; for a pretrained network, adamw) --" in text
    assert "drop them (default: drop clients of the data's own) --" in text
    assert "(default: )" not in text


def test_the_help_of_run_is_about_one_method(cli: Cli) -> None:
    text = " ".join(cli("run", "--help-all").out.split())
    assert "--algorithm NAME, --algorithms NAME the method, or your own as file.py:factory (default: fedmcsa)" in text
    assert "--baseline" not in text
    assert "--budget" not in text
    n_options = len(re.findall(r"^  -", cli("run", "--help-all").out, re.MULTILINE))
    n_said = re.search(r"--help-all shows all\s+(\d+)\.", cli("run", "--help").out)
    assert n_said
    assert int(n_said[1]) == n_options - len(("--help", "--help-all"))


def test_the_help_of_watch_says_when_there_is_a_report(cli: Cli) -> None:
    text = " ".join(cli("watch", "--help").out.split())
    assert "-o FILE, --out FILE also write a report to this HTML file, and renew it --" in text


def test_compare(cli: Cli, work: Path) -> None:
    done = cli("compare", "--algorithms", "fedavg,fedmcsa", *FAST, "--json", "r.json", "--out", "o", "--set", "sigma=9")
    assert done.code == 0, done.err
    content = json.loads((work / "r.json").read_text())
    assert content == json.loads((work / "o" / "result.json").read_text())
    assert [run["algorithm"] for run in content["runs"]] == ["local", "fedavg", "fedmcsa"]
    for run in content["runs"]:
        check_run(run)
        assert run["rounds"] == 4
    assert content["runs"][2]["config"]["options"] == {"sigma": 9}
    assert content["verdict"] in done.out
    assert "local was added" in done.out
    for text in ("method", "worst 10%", "> local", "fedmcsa", "The report is o/report.html"):
        assert text in done.out
    assert len(re.findall(r"^fedavg: round \d of 4, accuracy", done.err, re.M)) == 4
    assert json.loads((work / "o" / "partition.json").read_text())["hash"]
    saved = yaml.safe_load((work / "o" / "experiment.yaml").read_text())
    assert saved["algorithms"] == ["local", "fedavg", "fedmcsa"]
    assert not list(work.rglob("*.tmp"))
    # the experiment file is a configuration
    again = cli("compare", "--config", "o/experiment.yaml", "--quiet", "--json", "again.json")
    assert again.code == 0, again.err
    assert again.err == ""
    assert [run["clients"] for run in json.loads((work / "again.json").read_text())["runs"]] == [
        run["clients"] for run in content["runs"]
    ]
    assert [path.name[:15] for path in (work / "runs").iterdir()] == ["compare-digits-"]


def test_run_and_seeds(cli: Cli, work: Path) -> None:
    (work / "empty").mkdir()
    assert cli("run", "--algorithm", "fedavg", *FAST, "--json", "one.json", "--quiet", "--out", "empty").code == 0
    one = json.loads((work / "one.json").read_text())
    check_run(one)
    done = cli("run", "--algorithm", "fedavg", *FAST, "--seeds", 2, "--json", "two.json", "--out", "two")
    assert done.code == 0
    two = json.loads((work / "two.json").read_text())["runs"]
    assert [run["config"]["seed"] for run in two] == [0, 1]
    assert two[0]["clients"] == one["clients"]
    assert "±" in done.out
    assert "fedavg (seed 1): round 4 of 4" in done.err
    assert sorted(path.name for path in (work / "two" / "fedavg").iterdir()) == ["seed-0", "seed-1"]
    done = cli("run", *FAST, "--quiet")
    assert "fedmcsa" in done.out  # what run trains when nothing is said


def test_list(cli: Cli) -> None:
    done = cli("list")
    for text in ("algorithms", "data", "models", "partitions", "sigma=50.0", "beta=0.1", "FILE.csv", "hessian=fo"):
        assert text in done.out
    one = cli("list", "models")
    assert "mlr" in one.out
    assert "fedavg" not in one.out
    assert cli("list", "methods").out == cli("list", "algorithms").out
    content = json.loads(cli("list", "--json").out)
    assert {"local", "fedavg", "fedavg_ft", "fedprox", "perfedavg", "pfedme", "fedamp", "heurfedamp", "fedmcsa",
            "fedmcsa_no_mcsa", "fedavg_mcsa", "pfedme_mcsa"} <= content["algorithms"].keys()  # fmt: skip
    assert content["partitions"]["dirichlet"]["options"]["beta"] == 0.1
    assert "client_column" not in content["data"]["table"]["options"]


def test_data_show(cli: Cli, work: Path) -> None:
    done = cli("data", "show", "--partition", "iid", "--clients", 45, "--json", "d.json", "--picture", "p.png")
    assert done.code == 0, done.err
    assert "The first 40 of 45 clients" in done.out
    content = json.loads((work / "d.json").read_text())
    assert content["hash"] in done.out
    assert len(content["clients"]) == 45
    assert sum(sum(client["labels"]) for client in content["clients"]) == 1797
    assert content["heterogeneity"]["clients"] == 45
    assert (work / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_live_bar_on_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    done = cli("run", *FAST)
    assert done.code == 0
    assert "4/4" in done.err
    assert "accuracy" in done.err


def test_internal_errors(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops\nagain")

    monkeypatch.setattr("fedattune.training.fit.train_run", broken)
    done = cli("run", *FAST, "--out", "o")
    assert done.code == 1
    assert done.err.endswith("internal error: ZeroDivisionError: oops again; the details are in o/error.log\n")
    assert "in broken" in (work / "o" / "error.log").read_text()
    monkeypatch.setenv("FEDATTUNE_DEBUG", "1")
    assert "Traceback" in cli("run", *FAST, "--out", "o2").err
    monkeypatch.delenv("FEDATTUNE_DEBUG")
    monkeypatch.setattr("fedattune.cli.train.make_plan", broken)
    done = cli("run", *FAST, "--out", "o3")
    assert "set FEDATTUNE_DEBUG=1" in done.err
    assert not (work / "o3").exists()


def test_a_reader_that_leaves(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(
            sys.modules["fedattune.cli.main"], "run_command", lambda *_: print("x" * 10, file=closed, flush=True)
        )
        assert main([]) == 1
        monkeypatch.undo()


def test_training_that_diverges(cli: Cli, work: Path) -> None:
    done = cli("run", "--algorithm", "fedavg", "--model", "dnn", *FAST, "--lr", "1e30", "--quiet", "--json", "r.json")
    assert done.code == 2
    assert "lower the learning rate" in done.err
    assert done.err.count("\n") == 1
    assert not (work / "r.json").exists()
