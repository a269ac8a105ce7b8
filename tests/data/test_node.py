"""One node's data, as the node's configuration names them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.nodes import csv, loaded, rows, same_client
from fedattune import ConfigError, DataError, Federation, load_federation
from fedattune.data import Schema, export_clients, infer_schema, load_table, partition_dataset
from fedattune.data.node import find_node_problems


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load_federation("digits", clients=5, seed=1)


def test_table_of_several_clients(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", rows(20, "a") + rows(30, "b", 5))
    found = loaded(data=path, target="ill", client_column="ward", state="x", partition_id=1, num_partitions=2)
    assert found.numbers == (None, None)
    # A node scales client by client, because no other node knows its moments.
    whole = partition_dataset(load_table(path, client_column="ward", target="ill"), seed=0, scaling="client")
    assert found.federation.names == whole.names == ("a", "b")
    for u in (0, 1):
        same_client(found.federation, u, whole, u)


def test_rows_of_one_patient_stay_in_one_part(tmp_path: Path) -> None:
    """As in a simulation, with a shared schema too; `group-column` says otherwise."""
    lines = [f"{row},{i // 5}" for i, row in enumerate(rows(60))]
    path = csv(tmp_path / "t.csv", lines, head="ward,age,sex,ill,patient")
    node = {"data": path, "name": "a", "target": "ill"}
    whole = loaded(**node).federation
    assert whole.schema is not None
    assert "patient" not in whole.schema.columns
    for federation in (whole, loaded(whole.schema, **node).federation):
        client = federation.clients[0]
        parts = [set((part // 5).tolist()) for part in (client.train, client.validation, client.test)]
        assert sum(map(len, parts)) == 12
        assert federation.partition["grouped"] is True
    assert "grouped" not in loaded(**node, group_column="off").federation.partition
    with pytest.raises(ConfigError, match="group-column goes only with a table"):
        loaded(data="digits", clients=3, group_column="x")


def test_folder_of_tables(tmp_path: Path) -> None:
    csv(tmp_path / "w" / "south.csv", [row for row in rows(40) if ",m," in row])
    csv(tmp_path / "w" / "north.csv", rows(30, start=7))
    (tmp_path / "w" / ".hidden.parquet").write_text("")
    (tmp_path / "w" / "README.txt").write_text("")
    found = loaded(data=tmp_path / "w", target="ill")
    assert found.federation.names == ("north", "south")
    assert found.federation.partition["clients"] == 2
    assert found.federation.input_shape == (1 + 1 + 2,)  # ward has the one category a
    assert found.numbers == (None, None)
    with_schema = loaded(found.federation.schema, data=tmp_path / "w").federation
    assert torch.equal(with_schema.x, found.federation.x)
    assert with_schema.manifest() == found.federation.manifest()
    alone = loaded(found.federation.schema, data=tmp_path / "w" / "south.csv", name="south").federation
    same_client(found.federation, 1, alone, 0)


@pytest.mark.parametrize("n_targets", [1, 2])
def test_tables_of_one_node_share_the_scale_of_a_number(n_targets: int, tmp_path: Path) -> None:
    """Each table has a mean of its own; with a shared schema, the schema's constants hold."""
    target, values = ("cost", "days")[:n_targets], {"a": [], "b": []}
    for name, level in (("a", 10.0), ("b", 500.0)):
        values[name] = [[level + 1.5 * i, 3 * level - 0.5 * i][:n_targets] for i in range(40)]
        lines = [f"{20 + i},{'mf'[i % 2]},{','.join(map(str, one))}" for i, one in enumerate(values[name])]
        csv(tmp_path / "w" / f"{name}.csv", lines, head=f"age,sex,{','.join(target)}")
    node = {"data": tmp_path / "w", "target": ",".join(target)}
    federation = loaded(**node).federation
    scale = federation.target_scale
    assert scale is not None
    assert federation.schema is not None
    assert federation.schema.target_scale == scale
    given = np.array(values["a"] + values["b"]).reshape(80, *[n_targets] * (n_targets > 1))
    assert scale.restore(federation.y.double().numpy()) == pytest.approx(given, rel=1e-4)
    train = np.concatenate(list(federation.part("train")))
    assert np.array(scale.mean) == pytest.approx(given[train].mean(axis=0), rel=1e-5)

    mean, deviation = (100.0, 5.0) if n_targets == 1 else ((100.0, 7.0), (5.0, 2.0))
    common = federation.schema.model_copy(update={"target_mean": mean, "target_deviation": deviation})
    shared = loaded(common, **node).federation
    assert shared.target_scale == common.target_scale
    assert common.target_scale is not None
    assert common.target_scale.restore(shared.y.double().numpy()) == pytest.approx(given, rel=1e-4)


def test_known_data_set_for_trials(digits: Federation) -> None:
    found = loaded(infer_schema(digits), data="digits", clients=5, take="3 0", name="trial", seed=1)
    assert found.numbers == (3, 0)
    assert found.federation.names == ("3", "0")
    assert len(found.federation.x) == sum(len(digits.clients[u].all) for u in (3, 0))
    for k, u in enumerate(found.numbers):
        assert u is not None
        same_client(found.federation, k, digits, u)
    everyone = loaded(data="digits", partition="iid", clients="3")
    assert everyone.numbers == (0, 1, 2)
    assert loaded(data="digits", clients=5, take=4).numbers == (4,)
    made = loaded(data="synthetic", clients=3, take="1, 2")
    assert made.federation.names == ("1", "2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no data; name a table"),
        ({"datta": "x"}, "unknown key 'datta'; did you mean 'data'"),
        ({"data": "digits", "client_columm": "x"}, "did you mean 'client-column'"),
        ({"data": "digits", "clients": True}, "clients: input should be a number"),
        ({"data": "digits", "clients": 0}, "clients: .*greater than or equal to 1, got 0"),
        ({"data": "digits", "target": "x", "client_column": "y"}, "target and client-column goes only with a table"),
        ({"data": "digits", "clients": 3, "take": "0 3"}, "take: expected numbers of clients from 0 to 2.*got '3'"),
        ({"data": "digits", "take": "a"}, "take: .*got 'a'"),
        ({"data": "digits", "take": "1 1"}, "take: a client is named twice"),
        ({"data": "digits", "test": 1.5}, "test must be a fraction"),
        ({"data": "digit"}, "no file or folder 'digit', and no such data set; did you mean 'digits'"),
        ({"data": "t.csv", "take": "0"}, "take goes only with a known data set, not with 't.csv'"),
        ({"data": "t.csv"}, r"the table t.csv needs the column to predict: add target='COLUMN'"),
        ({"data": "t.csv", "target": "ill"}, "the table t.csv needs the client's name, name='...', or the column"),
        ({"data": "w", "target": "ill", "client_column": "ward"}, "client-column goes only with one table"),
        ({"data": "c", "target": "ill"}, "target goes only with a table, not with 'c'"),
        ({"data": "c", "test": 0.5}, "test goes only with data that are not divided yet"),
    ],
)
def test_refuses_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ragged: Federation, config: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    csv(tmp_path / "t.csv", rows(20))
    csv(tmp_path / "w" / "a.csv", rows(20))
    if config.get("data") == "c":
        export_clients(ragged, tmp_path, [[0]])[0].rename("c")
    with pytest.raises(ConfigError, match=message):
        loaded(**config)


def test_refuses_folders_and_tables(tmp_path: Path, ragged: Federation) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    with pytest.raises(DataError, match=r"w holds no clients; expected files that end in \.csv"):
        loaded(data=folder, target="ill")
    csv(folder / "a.csv", rows(20))
    export_clients(ragged, tmp_path, [[0], [1]])
    (tmp_path / "node-0" / "a.csv").write_text("")
    with pytest.raises(DataError, match=r"holds files of the kinds \.csv and \.safetensors"):
        loaded(data=tmp_path / "node-0")
    (tmp_path / "node-0" / "a.csv").unlink()
    source = tmp_path / "node-0" / "0-0.safetensors"
    (tmp_path / "node-0" / "copy.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(DataError, match="node-0 holds two clients of the number 0"):
        loaded(data=tmp_path / "node-0")
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(DataError, match="is no table"):
        loaded(data=tmp_path / "t.txt")
    schema = infer_schema(load_table(folder / "a.csv", client_column=None, target="ill"))
    with pytest.raises(DataError, match=r"client 'x' has 1 sample, .*give such clients more data$"):
        loaded(schema, data=csv(tmp_path / "t.csv", rows(1)), name="x")


def test_clients_of_one_node_must_fit_together(tmp_path: Path, ragged: Federation, digits: Federation) -> None:
    export_clients(ragged, tmp_path / "a", [[0]])
    export_clients(digits, tmp_path / "b", [[1]])
    (tmp_path / "b" / "node-0" / "1-1.safetensors").rename(tmp_path / "a" / "node-0" / "1-1.safetensors")
    with pytest.raises(DataError, match="client '1' differs from client '0' in classes and input_shape and scale"):
        loaded(data=tmp_path / "a" / "node-0")
    with pytest.raises(DataError, match="digits does not fit the schema: expected classes"):
        loaded(infer_schema(ragged), data="digits")


def test_all_problems_of_a_nodes_tables(tmp_path: Path) -> None:
    """Two tables of a folder, and then what only loading finds."""
    schema = Schema(classes=("n", "y"), numbers=("age",), categories={"sex": ("f", "m")}, target="ill")
    csv(tmp_path / "d" / "a.csv", ["a,x,f,n", *rows(9)])
    csv(tmp_path / "d" / "b.csv", ["b,20,q,n", *rows(9)])
    shares = {"test": 0.25, "validation": 0.1}
    found = find_node_problems({"data": str(tmp_path / "d")}, schema, **shares)
    assert len(found) == 2
    assert "a.csv: column 'age'" in found[0].text
    assert "b.csv: column 'sex'" in found[1].text
    csv(tmp_path / "d" / "a.csv", rows(9))
    csv(tmp_path / "d" / "b.csv", rows(9))
    assert find_node_problems({"data": str(tmp_path / "d")}, schema, **shares) == []
    (problem,) = find_node_problems({"data": str(tmp_path / "d" / "a.csv")}, schema, **shares)
    assert "needs the client's name" in problem.text
    csv(tmp_path / "d" / "a.csv", ["a,x,f,n", *rows(9)])
    found = find_node_problems({"data": str(tmp_path / "d" / "a.csv")}, schema, **shares)
    assert ["column 'age'" in found[0].text, "needs the client's name" in found[1].text] == [True, True]
    found = find_node_problems({"data": str(tmp_path / "d"), "client-column": "ward"}, schema, **shares)
    assert "client-column goes only with one table" in found[-1].text
    assert [one.kind for one in found] == ["data", "data"]
    for given, said in (
        ({"data": "x.csv", "nam": "y"}, "unknown key 'nam'; did you mean 'name'?"),
        ({"name": "y"}, "has no data"),
        ({"data": "digits", "target": "ill"}, "target goes only with a table"),
    ):
        (problem,) = find_node_problems(given, schema, **shares)
        assert problem.kind == "configuration"
        assert said in problem.text
