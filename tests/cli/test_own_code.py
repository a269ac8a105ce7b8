"""Methods, models and partitions of one's own on the command line, in YAML and in Python."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import fedattune
from cli_helpers import Done, numbers, refused
from crafted import seal
from fedattune.analysis.load import read_runs
from fedattune.core.own_code import load_function
from fedattune.models.files import rebuild_model

Cli = Callable[..., Done]
FAST = ("--data", "digits", "--clients", 5, "--rounds", 2, "--steps", 1, "--lr", 0.1, "--quiet")

CODE = '''
"""Code of a user."""

from dataclasses import dataclass

import numpy as np
from torch import nn

import helper
from fedattune import Algorithm
from fedattune.client import SGD, Proximal
from fedattune.core.options import NonNegative
from fedattune.server import Average


@dataclass(frozen=True)
class Mean(Average):
    """A class of the file, which worker processes must find."""


def near(*, mu: NonNegative = helper.MU, tag="x") -> Algorithm:
    """Pull to the mean."""
    return Algorithm(SGD((Proximal(mu),)), Mean(), evaluation_point="received")


def needs(*, mu: float) -> Algorithm:
    return near(mu=mu)


def fails() -> Algorithm:
    raise KeyError("lost")


def number() -> int:
    return 3


def fedavg() -> Algorithm:
    return near()


def narrow(input_shape, n_classes, *, hidden=4):
    n = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(n, hidden), nn.Tanh(), nn.Linear(hidden, n_classes))


def halves(labels, n_clients, seed, *, keep: float = 1.0):
    """Equal parts in the order of the labels."""
    order = np.argsort(labels, kind="stable")[: int(keep * len(labels))]
    return np.array_split(order, n_clients)


def too_few(labels, n_clients, seed):
    return [np.arange(3)]


def outside(labels, n_clients, seed):
    return [np.array([len(labels) + i]) for i in range(n_clients)]


def twice(labels, n_clients, seed):
    return [np.array([1, 1])] * n_clients


def words(labels, n_clients, seed):
    return ["a"] * n_clients


def broken(labels, n_clients, seed):
    return 1 / 0


value = 3
'''


@pytest.fixture
def code(work: Path) -> Path:
    """A custom file in a folder, with a neighbour that it imports."""
    folder = work / "code"
    folder.mkdir()
    (folder / "helper.py").write_text("MU = 0.5\n")
    (folder / "own.py").write_text(CODE)
    return folder / "own.py"


def test_a_method_of_a_file_stands_beside_built_in_ones(cli: Cli, code: Path) -> None:
    done = cli("compare", *FAST, "--algorithms", "fedavg,code/own.py:near", "--set", "near.mu=0.25", "--out", "o")
    assert done.code == 0, done.err
    assert [row.split()[0] for row in done.out.splitlines()[3:6]] == ["local", "fedavg", "near"]
    config = json.loads(Path("o/near/seed-0/config.json").read_text())
    assert config["algorithm"] == "near"
    assert config["options"] == {"mu": 0.25}
    assert "Proximal" in config["definition"]
    assert "0.25" in config["definition"]
    assert [run.algorithm for run in read_runs(["o"]).results] == ["local", "fedavg", "near"]
    for words in ("report o", "explain o --algorithm near", "watch o --once", "plot o --kind curves -o c.svg"):
        assert cli(*words.split()).code == 0, words
    assert "please cite the source of method near" in cli("cite", "o").out
    assert cli("export", "o", "--algorithm", "near", "--client", 0, "-o", "m.safetensors").code == 0


def test_it_resumes_from_another_folder_and_trains_in_processes(
    cli: Cli, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ("--algorithms", "code/own.py:near", "--seeds", 2)
    assert cli("compare", *FAST, *methods, "--out", "one", "--processes", 1).code == 0
    assert cli("compare", *FAST, *methods, "--out", "two", "--processes", 2).code == 0
    first = numbers(Path("one/result.json"))
    assert numbers(Path("two/result.json")) == first
    out = Path("one").resolve()
    (out / "near" / "seed-1" / "result.json").unlink()
    (code.parent / "elsewhere").mkdir()
    monkeypatch.chdir(code.parent / "elsewhere")
    yes = ("--allow-code", f"{code}:near")
    done = cli("compare", "--resume", out, "--quiet", *yes)
    assert done.code == 0, done.err
    assert numbers(out / "result.json") == first
    code.unlink()
    refused(cli("compare", "--resume", out, *yes), f"there is no file {code}; give the path of a Python file")


def test_a_module_a_yaml_file_and_python_take_the_same(cli: Cli, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(code.parent))
    assert cli("run", *FAST, "--algorithm", "own:near", "--out", "module").code == 0
    Path("e.yaml").write_text(
        "algorithms: [code/own.py:near]\nmodel: code/own.py:narrow\npartition: code/own.py:halves\n"
        "set: {code/own.py:near: {mu: 0.125}, narrow.hidden: 3, halves: {keep: 0.5}}\n"
    )
    yes = ("--allow-code", "code/own.py:near,code/own.py:narrow", "--partition", "code/own.py:halves")
    done = cli("run", *FAST, "--config", "e.yaml", "--out", "yaml", *yes)
    assert done.code == 0, done.err
    config = json.loads(Path("yaml/near/seed-0/config.json").read_text())
    assert (config["options"], config["model_options"]) == ({"mu": 0.125}, {"hidden": 3})
    assert (config["partition"]["name"], config["partition"]["options"]) == ("halves", {"keep": 0.5})

    data = fedattune.load_federation("digits", partition="dirichlet", clients=5)
    one = fedattune.fit(data, "code/own.py:near", "code/own.py:narrow", rounds=2, options={"mu": 0.25}, out="p")
    assert one.algorithm == "near"
    other = fedattune.runs.result.Result.load("p")  # type: ignore[attr-defined]
    with pytest.raises(fedattune.RunError, match=r"p was trained with 'own\.py:narrow', which is code of some"):
        other.model("0")
    assert other.model("0", factory="code/own.py:narrow")[1].out_features == 4
    with pytest.raises(fedattune.RunError, match=r"'own\.py:near'.*give what it makes as `algorithm`"):
        fedattune.personalize(other, data, rounds=1)
    near = load_function("code/own.py:near", "the method")(mu=0.25)
    with pytest.raises(fedattune.RunError, match=r"'own\.py:narrow'.*give what it makes as `module`"):
        fedattune.personalize(other, data, rounds=1, algorithm=near)
    module = rebuild_model({**other.config, **other.facts})
    assert fedattune.personalize(other, data, rounds=1, algorithm=near, module=module)
    found = fedattune.compare(data, ["code/own.py:near"], rounds=2, options={"near.mu": 0.25}, tune=1)
    assert [row.algorithm for row in found.rows] == ["local", "near", "majority"]


def test_a_model_of_a_file_trains_and_its_file_runs_no_code_by_itself(cli: Cli, code: Path) -> None:
    model = ("--model", "code/own.py:narrow", "--set", "narrow.hidden=3")
    assert cli("compare", *FAST, *model, "--algorithms", "fedavg", "--out", "o").code == 0
    assert cli("compare", "--resume", "o", "--quiet", "--allow-code", "code/own.py:narrow").code == 0
    export = ("export", "o", "--algorithm", "fedavg", "--client", 0, "-o", "m.safetensors")
    done = cli(*export)
    assert done.code == 2
    assert "is not run because a file names it; if it is yours, say so by factory='own.py:narrow'" in done.err
    assert cli(*export, "--factory", "code/own.py:narrow").code == 0
    with pytest.raises(fedattune.RunError, match=r"by factory='own\.py:narrow'"):
        fedattune.load_model("m.safetensors")
    with pytest.raises(fedattune.RunError, match="not run because a file names it"):
        fedattune.load_model("m.safetensors", factory="code/own.py:other")
    loaded = fedattune.load_model("m.safetensors", factory="code/own.py:narrow")
    assert loaded[1].out_features == 3  # type: ignore[index]


def test_a_partition_of_a_file_divides_and_resumes(cli: Cli, code: Path) -> None:
    own = ("--partition", "code/own.py:halves", "--set", "halves.keep=0.5")
    done = cli("compare", *FAST, *own, "--algorithms", "fedavg", "--splits", 2, "--out", "o")
    assert done.code == 0, done.err
    partition = json.loads(Path("o/partition.json").read_text())
    assert partition["partition"]["name"] == "halves"
    assert sum(len(one[part]) for one in partition["clients"] for part in ("train", "validation", "test")) == 898
    assert cli("compare", "--resume", "o", "--quiet", "--allow-code", "code/own.py:halves").code == 0
    assert cli("data", "show", "--data", "digits", "--clients", 5, *own).code == 0
    assert "partition halves" in cli("cite", "o").out
    data = fedattune.load_federation("digits", partition="code/own.py:halves", clients=4)
    assert data.n_clients == 4
    assert fedattune.compare(data, ["fedavg"], rounds=1).rows


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.py:near", "there is no file"),
        ("code/own.py:neer", "has no function 'neer' that makes the method; did you mean 'near'?"),
        ("code/own.py:value", "has a int, no function, called 'value'"),
        ("code/own.py", "name the function that makes the method, too: code/own.py:function"),
        ("code/own.py:fails", "own.py:fails failed: KeyError: 'lost'"),
        ("code/own.py:number", "returned int, expected an Algorithm"),
        ("code/own.py:needs", "needs.mu: it has no default; give a value"),
        ("code/own.py:fedavg", "FedAttune uses the name fedavg itself; rename your function"),
        ("code/own.py:near --set near.nu=3", "near has no option 'nu'; known: mu, tag"),
        ("code/own.py:near --set near.mu=-1", "near.mu: input should be greater than or equal to 0"),
        ("code/own.py:near,twin.py:near", "have the same name; rename one of the functions"),
        ("syntax.py:near", "cannot import"),
        ("no.such.module:near", "cannot import 'no.such.module' for the method"),
        ("fedavg --partition code/own.py:too_few", "returned 1 parts, expected 5 arrays"),
        ("fedavg --partition code/own.py:outside", "sample numbers should be from 0 to 1796"),
        ("fedavg --partition code/own.py:twice", "name each sample once"),
        ("fedavg --partition code/own.py:words", "expected sample numbers (m,) of int"),
        ("fedavg --partition code/own.py:broken", "failed: ZeroDivisionError: division by zero"),
        ("fedavg --partition code/own.py:none", "has no function 'none' that makes the partition"),
        ("fedavg --model code/own.py:fails", "fails(input_shape=(1, 8, 8), n_classes=10) failed"),
        ("fedavg --model none.py:net", "there is no file"),
    ],
)
def test_what_is_wrong_is_one_sentence(name: str, said: str, cli: Cli, code: Path) -> None:
    Path("syntax.py").write_text("def near(:\n")
    Path("twin.py").write_text(CODE.replace("import helper\n", "").replace("helper.MU", "1.0"))
    method, *more = name.split()
    refused(cli("compare", *FAST, "--algorithms", method, *more, "--out", "o"), said)
    assert not Path("o").exists()


def test_a_deployment_says_how_code_gets_to_the_nodes(cli: Cli, code: Path) -> None:
    pytest.importorskip("flwr")
    deploy = ("deploy", "write", "--data", "digits", "--clients", 4, "--out", "kit")
    refused(cli(*deploy, "--algorithms", "code/own.py:near"), "own.py:near: a deployment takes a method of your own")
    refused(cli(*deploy, "--algorithms", "fedavg", "--model", "code/own.py:narrow"), "nodes have no such file")


MARK = """
from pathlib import Path

Path("ran").touch()


def make(*_, **__):
    raise SystemExit("it ran")
"""


@pytest.fixture
def mark(work: Path) -> Path:
    """Code that leaves a file behind when it is imported."""
    (work / "mark.py").write_text(MARK)
    return work / "mark.py"


@pytest.mark.parametrize("key", ["algorithms: [mark.py:make]", "model: mark:make", "partition: ./mark.py:make"])
def test_no_command_runs_code_because_a_file_names_it(key: str, cli: Cli, mark: Path) -> None:
    Path("e.yaml").write_text(f"data: digits\nclients: 5\nrounds: 2\n{key}\n")
    name = "mark:make" if "mark:make" in key else f"{mark}:make"
    said = f"e.yaml names code of somebody's own, {name}, which is not run because a file names it; "
    for words in ("run", "compare", "data show", "deploy write"):
        refused(
            cli(*words.split(), "--config", "e.yaml"), f"{said}if it is yours, or you have read it, say so by --allow"
        )
        refused(cli(*words.split(), "--config", "e.yaml", "--lr", "x", "--allow-code", "other.py:make"), said)
    Path("e.yaml").write_text("allow_code: [mark:make]\n")
    refused(cli("run", "--config", "e.yaml"), "allow_code stands only on the command line")
    assert not Path("ran").exists()


def test_no_command_runs_code_because_a_run_folder_names_it(cli: Cli, mark: Path) -> None:
    assert cli("compare", *FAST, "--algorithms", "fedavg", "--out", "o").code == 0
    experiment = Path("o/experiment.yaml")
    experiment.write_text(
        experiment.read_text().replace("model: mlr", "model: mark:make").replace("- local", "- mark.py:make")
    )
    for config in Path("o").glob("*/seed-0/config.json"):
        content = json.loads(config.read_text()) | {"model": "mark:make", "algorithm_source": "mark.py:make"}
        config.write_text(json.dumps(content))
    seal(Path("o"))
    refused(
        cli("compare", "--resume", "o"),
        f"o/experiment.yaml names code of somebody's own, mark:make, {mark}:make, which is not run because",
    )
    for words in (
        "report o",
        "explain o",
        "watch o --once",
        "plot o --kind curves -o c.svg",
        "table o",
        "cite o",
        "export o --client 0",
    ):
        done = cli(*words.split())
        assert "internal error" not in done.err, words
        assert not Path("ran").exists(), words


def test_a_study_runs_no_code_because_its_file_names_it(cli: Cli, mark: Path) -> None:
    Path("s.yaml").write_text(
        "title: t\nmeasure: last\ncolumns: {a: {data: digits, model: mark:make}}\nrows: {r: {algorithm: local}}\n"
    )
    refused(cli("reproduce", "s.yaml"), "s.yaml names code of somebody's own, mark:make, which is not run because")
    assert not Path("ran").exists()
    refused(cli("reproduce", "s.yaml", "--allow-code", "mark:make"), "source: Field required")
