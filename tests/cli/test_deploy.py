"""`fedattune deploy`: the folder of a real federation, and what cannot be."""

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Done

pytest.importorskip("flwr", reason="a real federation needs Flower")

from fedattune.data import Schema
from fedattune.deploy.config import list_node_rules
from fedattune.deploy.node.client_app import make_client_app
from fedattune.deploy.server.server_app import run_server
from flower.in_process import InProcessGrid

Cli = Callable[..., Done]
TABLE = "ward,age,sex,lactate,outcome\n" + "".join(
    f"{ward},{20 + 3 * i + j},{'fm'[(i + j) % 2]},{'' if i % 5 == 0 else i / 7},{'died' if (i + j) % 3 else 'lived'}\n"
    for j, ward in enumerate("abcd")
    for i in range(30)
)


def tables(folder: Path) -> dict[str, Any]:
    return {path.stem: tomllib.loads(path.read_text()) for path in sorted((folder / "nodes").glob("*.toml"))}


def config(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def run_in_process(folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]]) -> Any:
    monkeypatch.chdir(folder)
    values = config(folder) | {"poll": 0.001, "rounds": 2, "start-timeout": 1.0}
    grid = InProcessGrid(make_client_app(), nodes, values)
    return run_server(grid, values, log=lambda _: None)


def test_a_trial_runs_as_written(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration and the nodes' files give the numbers of `compare` with the same options."""
    options = ("--data", "digits", "--clients", 4, "--partition", "dirichlet", "--model", "dnn", "--lr", 0.1)
    options += ("--algorithms", "local,fedrep", "--set", "fedrep.momentum=0.5", "--epochs", 1, "--rounds", 2)
    done = cli("deploy", "write", *options, "--nodes", 2, "--out", "d")
    assert done.code == 0, done.err
    assert "d is ready for 2 nodes" in done.out
    nodes = [{**node, "state": f"state/{i}"} for i, node in tables(work / "d").items()]
    assert [node["data"] for node in nodes] == ["data/node-0", "data/node-1"]
    assert "steps" not in config(work / "d")
    results = run_in_process(work / "d", monkeypatch, nodes)
    monkeypatch.chdir(work)
    defence = ("--screening", "groups", "--accept", "harmless")  # the default of deployments
    done = cli("compare", *options, *defence, "--out", "c", "--quiet")
    assert done.code == 0, done.err
    runs = json.loads((work / "c" / "result.json").read_text())["runs"]
    for result, run in zip(results, runs, strict=True):
        final = run["final"][run["evaluation_point"]]
        assert result.metrics["acc_uniform"] == pytest.approx(final["acc_uniform"], abs=1e-6)
    assert (work / "d" / "runs" / "deployment" / "report.html").exists()


def test_real_nodes_with_tables_of_their_own(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema from a sample, a node with a table of two wards, one with a folder of one table per ward."""
    (work / "sample.csv").write_text(TABLE)
    sample = ("--data", "sample.csv", "--client-column", "ward", "--target", "outcome")
    assert cli("data", "show", *sample, "--schema", "schema.yaml").code == 0
    schema = Schema.read(work / "schema.yaml")
    assert (schema.numbers, schema.flagged) == (("age", "lactate"), ("lactate",))
    assert schema.categories == {"sex": ("f", "m")}
    done = cli("deploy", "write", "--schema-file", "schema.yaml", "--algorithms", "fedavg,local", "--out", "d")
    assert done.code == 0, done.err
    assert "Write into d/nodes where each node has its data" in done.out
    assert tables(work / "d")["0"]["data"].startswith("CHANGE ME")
    lines = TABLE.splitlines()
    two = [line for line in lines[1:] if line[0] in "ab"]
    (work / "one.csv").write_text("\n".join([lines[0], *two]))
    (work / "wards").mkdir()
    for ward in "cd":
        rows = [line.partition(",")[2] for line in lines if line.startswith((f"{ward},", "ward"))]
        (work / "wards" / f"{ward}.csv").write_text("\n".join(rows))
    nodes = [
        {"name": "north", "data": str(work / "one.csv"), "client-column": "ward", "state": "state/0"},
        {"name": "south", "data": str(work / "wards"), "state": "state/1"},
    ]
    fedavg, local = run_in_process(work / "d", monkeypatch, nodes)
    assert [client.id for client in fedavg.clients] == list("abcd")
    assert fedavg.rounds == local.rounds == 2
    assert len(list((work / "d" / "state" / "1").rglob("models/*.safetensors"))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", 0), "--nodes: input should be greater than or equal to 1, got '0'"),
        (("--nodes", 30, "--clients", 20), "--nodes: got 30, expected at most the 20 clients of the data"),
        (("--algorithms", "fedmsca"), "did you mean 'fedmcsa'"),
        (("--engine", "sequential"), "unknown option --engine"),
        (("--round-timeout", "soon"), "--round-timeout: input should be a valid number"),
        (("--set", "fedavg.sigma=1"), "sigma"),
        (("--schema-file", "no.yaml"), "no.yaml"),
        (("--schema-file", "no.yaml", "--data", "digits"), "--schema-file and --data: give one"),
        (("--algorithms", "fedbn", "--model", "nosuch"), "unknown model 'nosuch'"),
        (("--port", 9100), "need different ports"),
        (("--rounds", 0), "--rounds"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    cli: Cli, work: Path, options: tuple[Any, ...], message: str
) -> None:
    done = cli("deploy", "write", *options, "--out", "d")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (work / "d").exists() or not list((work / "d").iterdir())


def test_without_flower_there_is_one_sentence(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.deploy.find_spec", lambda _: None)
    done = cli("deploy", "write", "--out", "d")
    assert (done.code, "pip install '.[flower]'" in done.err) == (2, True)


def test_secure_aggregation_runs_as_written(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--data", "digits", "--clients", 6, "--model", "mlr", "--algorithms", "fedavg", "--rounds", 2)
    done = cli("deploy", "write", *options, "--nodes", 3, "--secure-aggregation", "--out", "d")
    assert done.code == 0, done.err
    subprocess.run(["./certificates.sh"], cwd=work / "d", check=True, capture_output=True)
    assert len((work / "d/nodes/roster.pub").read_text().splitlines()) == 3
    nodes = list(tables(work / "d").values())
    assert nodes[1] == {
        "name": "node-1", "data": "data/node-1", "key": "keys/node-1", "roster": "nodes/roster.pub",
        "secure-aggregation": "required", "min-participants": 3,
    }  # fmt: skip
    assert [list_node_rules({"secure-aggregation": True, "nodes": n}, 0)["min-participants"] for n in (5, 10)] == [4, 7]
    for file in ("compose.yaml", "systemd/fedattune-node@.service", "README.md"):
        assert "nodes/roster.pub" in (work / "d" / file).read_text(), file
    checked = cli("node", "check", "d/nodes/1.toml")
    assert "3 nodes in the roster (node-0, node-1, node-2)" in " ".join(checked.out.split())
    checked = cli("deploy", "check", "d")
    assert "the server learns sums over 3 nodes" in " ".join(checked.out.split())
    (result,) = run_in_process(work / "d", monkeypatch, [{**n, "state": f"s/{n['name']}"} for n in nodes])
    assert not result.store.faults()
    assert [one.id for one in result.clients] == ["all clients together"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--algorithms", "local,fedmcsa"), "a server that knows the weights W and the mixtures W X solves for X"),
        (("--algorithms", "fedavg", "--nodes", 2), "got 2 nodes, expected 3 to 49"),
        (("--algorithms", "fedavg", "--secure-bits", 50), "secure-bits"),
    ],
)
def test_what_no_sum_can_do_is_refused(more: tuple[Any, ...], sentence: str, cli: Cli, work: Path) -> None:
    options = ("--data", "digits", "--clients", 6, "--nodes", 3, "--secure-aggregation", "--out", "d")
    done = cli("deploy", "write", *options, *more)
    assert done.code == 2
    assert sentence in done.err
    assert not (work / "d").exists()
