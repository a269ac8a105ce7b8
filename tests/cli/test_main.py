"""Whatever is wrong: one sentence on stderr, exit code 2, no traceback, nothing written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Done, files, hospital_rows, refused, write_csv

Cli = Callable[..., Done]
TABLE = ("--data", "p.csv", "--client-column", "hospital", "--target", "outcome")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "give a command"),
        ("comapre", "unknown command 'comapre'; did you mean 'compare'?"),
        ("data", "give an action"),
        ("data shew", "unknown command 'shew'; did you mean 'show'?"),
        ("list modls", "did you mean 'models'?"),
        ("list --jsno", "did you mean '--json'?"),
        ("compare --ronds 5", "unknown option --ronds, did you mean '--rounds'?"),
        ("compare --zzz", "unknown option --zzz; see fedattune compare --help"),
        ("compare extra", "unexpected argument 'extra'"),
        ("compare --rounds", "--rounds: expected a value"),
        ("compare --rounds 0", "--rounds: input should be greater than or equal to 1, got '0'"),
        ("compare --rounds 1e3", "--rounds: input should be a valid integer"),
        ("compare --lr nan", "--lr: input should be a finite number"),
        ("compare --lr -1 --seed -1 --test 2", "--test: input should be less than 1, got '2'"),
        ("compare --engine fast", "--engine: input should be 'auto', 'sequential', 'vectorized' or 'ray'"),
        ("compare --steps 5 --epochs 2", "not both"),
        ("compare --cohort 11", "cohort: got 11 clients per round, expected at most the 10"),
        ("compare --cohort 0", "--cohort: expected a number of clients from 1 to 10,000,000, or a fraction"),
        ("compare --cohort 1e400", "--cohort: expected a number of clients"),
        ("compare --seed 4294967296", "--seed: input should be less than 4294967296"),
        ("compare --seed 4294967295 --seeds 2", "--seeds: the last seed"),
        ("compare --split-seed 4294967296", "--split-seed: input should be less than"),
        ("compare --rounds 1000001", "--rounds: input should be less than or equal to 1000000"),
        ("compare --steps 99999999999999999999", "--steps: input should be less than or equal to 1000000"),
        ("compare --epochs 1000001", "--epochs: input should be less than or equal to 1000000"),
        ("compare --batch-size 1000001", "--batch-size: input should be less than or equal to 1000000"),
        ("compare --clients 10000001", "--clients: input should be less than or equal to 10000000"),
        ("compare --lr 1e39", "--lr: input should be at most 1e+38"),
        ("compare --set fedmcsa.sigma=1.0e+13", "sigma: input should be at most 1e+12"),
        ("compare --set dnn.hidden=100000000000 --model dnn", "hidden"),
        ("data show --data synthetic --clients 1000001", "clients: input should be less than or equal to"),
        ("compare --set fedmcsa.sigma=true", "sigma: input should be a number, not true or false, got True"),
        ("compare --out p/x --json p/y", "there is no folder p"),
        ("compare --algorithms local,fedavgg", "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        ("compare --algorithms all,foo", "unknown algorithm 'foo'"),
        ("compare --algorithms fedavgg,all --rounds 0", "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        ("run --algorithms all", "run trains one algorithm, got all"),
        ("run --algorithms fedavg,all", "run trains one algorithm, got fedavg, all"),
        ("run --algorithm local,fedavg", "use fedattune compare"),
        ("run --algorithm all", "use fedattune compare"),
        ("run --budget 1m", "--budget 1m: only compare has a budget; leave it out"),
        ("run --baseline sklearn", "--baseline: only compare has baselines; leave it out"),
        ("compare --model mlrr", "unknown model 'mlrr'; did you mean 'mlr'?"),
        ("compare --data digitz", "unknown data 'digitz'; did you mean 'digits'?"),
        ("compare --partition dirichle", "did you mean 'dirichlet'?"),
        ("compare --partition by_column", "no clients of its own"),
        ("compare --partition two_class --clients 7", "clients that work"),
        ("compare --set fedmcsa.sigmaa=5", "did you mean 'sigma'?"),
        ("compare --set fedmcsa.sigma=-5", "sigma"),
        ("compare --set dirichlet.beta=0", "beta"),
        ("compare --set pfedme.lam=5", "nothing called 'pfedme' is used here"),
        ("compare --set sigma", "expected option=value"),
        ("compare --set hidden=5", "has an option 'hidden'"),
        ("compare --client-column hospital", "client_column"),
        ("compare --config none.yaml", "none.yaml"),
        ("compare --json none/r.json", "there is no folder none"),
        ("compare --json .", "this is a folder"),
        ("compare --resume none", "there is no run of fedattune here"),
        ("compare --resume none --zzz", "unknown option --zzz"),
        ("compare --resume none --rounds 5 --lr 1 --device cpu", "--lr, --rounds cannot be given with --resume"),
        ("compare --resume none --out x", "cannot be given with --resume"),
        ("compare --save-partition iid", "built-in partition"),
        ("compare --model nowhere.models:make", "nowhere"),
        ("compare --data p.csv", "p.csv"),
        ("data show --data p.csv", "p.csv"),
        ("data show --rounds 5", "unknown option --rounds"),
        ("data show --picture a.bmp", ".png"),
        ("data show --picture none/a.png", "there is no folder none"),
        ("data show --set sigma=5", "has an option 'sigma'"),
    ],
)
def test_options(cli: Cli, work: Path, argv: str, said: str) -> None:
    before = files(work.parent)
    refused(cli(*argv.split()), said)
    assert files(work.parent) == before


def nan_feature(rows: list[dict[str, Any]]) -> None:
    rows[3]["age"] = "inf"


def one_sample(rows: list[dict[str, Any]]) -> None:
    rows.append(rows[0] | {"hospital": "tiny"})


@pytest.mark.parametrize(("change", "said"), [(nan_feature, "age"), (one_sample, "'tiny' has 1 sample")])
def test_tables(cli: Cli, work: Path, change: Callable[[Any], None], said: str) -> None:
    rows: list[dict[str, Any]] = hospital_rows(3)
    change(rows)
    write_csv(work / "p.csv", rows)
    before = files(work.parent)
    refused(cli("compare", *TABLE, "--small-clients", "error"), said)
    assert files(work.parent) == before


MODELS = """
from torch import nn
def wrong(input_shape, n_classes): return nn.Linear(3, n_classes)
def none(input_shape, n_classes): return None
def fails(input_shape, n_classes): raise KeyError("no")
def tiny(input_shape, n_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, n_classes))
"""


def test_nothing_is_written_over(cli: Cli, work: Path) -> None:
    (work / "full").mkdir()
    (work / "full" / "thesis.txt").write_text("years of work")
    (work / "file").write_text("x")
    before = files(work.parent)
    refused(cli("compare", "--out", "full"), "--resume full")
    refused(cli("compare", "--out", "file"), "this is a file")
    assert files(work.parent) == before
    assert (work / "full" / "thesis.txt").read_text() == "years of work"


def test_wrong_yaml_is_told_at_once(cli: Cli, work: Path) -> None:
    (work / "e.yaml").write_text("ronds: 3\nlr: fast\n")
    done = cli("compare", "--config", "e.yaml", "--seed", "-3", "--datta", "x")
    for said in ("'ronds', did you mean 'rounds'?", "e.yaml: lr: ", "--seed: ", "--datta, did you mean '--data'?"):
        refused(done, said)


def test_wrong_names_are_told_at_once(cli: Cli, work: Path) -> None:
    line = (
        "compare --data digitz --algorithms local,fedavgg,fedmcsa --partition dirichle --model mlrr "
        "--set fedmcsa.sigmaa=3 --set depth=3 --save-partition iid"
    )
    done = cli(*line.split())
    for said in (
        "unknown data 'digitz'; did you mean 'digits'?",
        "unknown algorithm 'fedavgg'; did you mean 'fedavg'?",
        "unknown partition 'dirichle', and no such file; did you mean 'dirichlet'?",
        "unknown model 'mlrr'; did you mean 'mlr'?",
        "fedmcsa has no option 'sigmaa'; did you mean 'sigma'?",
        "--save-partition iid: this is a built-in partition",
    ):
        refused(done, said)
    assert "depth" not in done.err  # it may belong to what is not known
    done = cli("compare", "--steps", 5, "--epochs", 2, "--cohort", 0, "--lr", -1, "--set", "x", "--set", "=1")
    for said in ("not both", "--cohort: ", "--lr: ", "--set x, =1: "):
        refused(done, said)
    done = cli("compare", "--set", "fedmcsa.sigma=-1", "--set", "fedmcsa.lam=x", "--cohort", 11)
    for said in ("fedmcsa.sigma: ", "fedmcsa.lam: ", "cohort: got 11"):
        refused(done, said)


def test_the_real_command(process: Cli, work: Path) -> None:
    before = files(work.parent)
    refused(process("compare", "--cohort", 11), "cohort: got 11 clients per round")
    assert files(work.parent) == before


def test_a_saved_partition_is_not_written_over(cli: Cli, work: Path) -> None:
    assert cli("data", "show", "--clients", 5, "--save-partition", "five").code == 0
    assert cli("data", "show", "--clients", 5, "--save-partition", "five").code == 0  # the same one
    refused(cli("compare", "--clients", 4, "--save-partition", "five", "--out", "o"), "already holds another")
    refused(cli("compare", "--partition", "five", "--set", "beta=1"), "has an option 'beta'")
    assert not (work / "o").exists()
    done = cli("data", "show", "--partition", "five")
    assert done.code == 0
    assert "5 clients" in done.out


def test_a_pipe_with_few_letters_gets_question_marks(work: Path) -> None:
    """Windows' pipes know a few hundred letters; the output must not end in an error of encoding."""
    rows = "\n".join(f"{name},{i},{'yes' if i % 2 else 'no'}" for name in ("北京", "Zürich") for i in range(40))
    (work / "t.csv").write_text(f"place,a,outcome\n{rows}\n", "utf-8")
    words = ["data", "show", "--data", "t.csv", "--client-column", "place", "--target", "outcome"]
    done = subprocess.run(
        [sys.executable, "-m", "fedattune", *words],
        capture_output=True,
        cwd=work,
        env={**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Zürich" in done.stdout.decode("cp1252")
    assert "??" in done.stdout.decode("cp1252")
