"""One node's data: what its configuration may name, and clients that are handed out to nodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedattune
from fedattune import ConfigError, DataError, Federation, load_federation
from fedattune.data import (
    NodeData,
    Schema,
    deal_clients,
    export_clients,
    federate,
    infer_schema,
    load_node,
    load_table,
)
from fedattune.data.client_index import PARTS, Client

HEAD = "ward,age,sex,ill"


def rows(n: int, ward: str = "a", start: int = 0) -> list[str]:
    return [f"{ward},{20 + 3 * i + start},{'mf'[i // 2 % 2]},{'yn'[i % 3 > 0]}" for i in range(n)]


def csv(path: Path, lines: list[str], head: str = HEAD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *lines, ""]))
    return path


def loaded(schema: Schema | None = None, *, seed: int = 0, **config: Any) -> NodeData:
    keys = {key.replace("_", "-"): str(v) if isinstance(v, Path) else v for key, v in config.items()}
    return load_node(keys, schema, test=0.25, validation=0.1, seed=seed)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load_federation("digits", clients=5, seed=1)


def same_client(one: Federation, u: int, other: Federation, v: int) -> None:
    """Whether two clients have the same samples, labels and features, part by part and in order."""
    a, b = one.clients[u], other.clients[v]
    assert a.name == b.name
    for part in PARTS:
        i, k = torch.from_numpy(getattr(a, part)), torch.from_numpy(getattr(b, part))
        assert torch.equal(one.x[i], other.x[k])
        assert one.x.dtype == other.x.dtype
        assert torch.equal(one.y[i], other.y[k])
        assert torch.equal(one.features(i), other.features(k))


def test_table_of_several_clients(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", rows(20, "a") + rows(30, "b", 5))
    found = loaded(data=path, target="ill", client_column="ward", state="x", partition_id=1, num_partitions=2)
    assert found.numbers == (None, None)
    whole = federate(load_table(path, client_column="ward", target="ill"), seed=0)
    assert found.federation.names == whole.names == ("a", "b")
    for u in (0, 1):
        same_client(found.federation, u, whole, u)


def test_one_client_and_the_schema(tmp_path: Path) -> None:
    whole = csv(tmp_path / "all.csv", [*rows(20, "a"), *rows(20, "b")])
    schema = infer_schema(load_table(whole, client_column="ward", target="ill", features=["age", "sex"]))
    path = csv(tmp_path / "t.csv", [row for row in rows(40) if ",m," in row])
    found = loaded(schema, data=path, name="north")
    assert found.numbers == (None,)
    assert found.federation.names == ("north",)
    assert found.federation.input_shape == (3,)
    assert found.federation.schema == schema
    assert not found.federation.x[:, 1].any()  # no one is f
    sizes = [len(getattr(found.federation.clients[0], part)) for part in PARTS]
    assert sizes == [14, 1, 5]
    own = loaded(schema, data=path, name="north", test=0.5, validation=0)
    assert [len(getattr(own.federation.clients[0], part)) for part in PARTS] == [10, 0, 10]
    other = loaded(schema, data=path, name="north", seed=1).federation
    assert not np.array_equal(other.clients[0].train, found.federation.clients[0].train)


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


def test_divided() -> None:
    assert deal_clients(5, 2) == [[0, 2, 4], [1, 3]]
    assert deal_clients(5, 2, blocks=True) == [[0, 1, 2], [3, 4]]
    for nodes in (0, 6):
        with pytest.raises(ConfigError, match=f"5 clients cannot be divided among {nodes} nodes"):
            deal_clients(5, nodes)


def put_together(nodes: list[NodeData], n: int) -> Federation:
    """All nodes' clients in one federation, each at its number."""
    xs, ys, clients, end = [], [], {}, 0
    for node in nodes:
        fed = node.federation
        for number, client in zip(node.numbers, fed.clients, strict=True):
            clients[number] = Client(client.name, *(getattr(client, part) + end for part in PARTS))
        xs.append(fed.x)
        ys.append(fed.y)
        end += len(fed.y)
    first = nodes[0].federation
    return Federation(
        name="together",
        x=torch.cat(xs),
        y=torch.cat(ys),
        classes=first.classes,
        clients=[clients[u] for u in range(n)],
        shift=first.shift,
        scale=first.scale,
    )


def test_exported_clients_train_as_in_the_whole_federation(tmp_path: Path, digits: Federation) -> None:
    folders = export_clients(digits, tmp_path, deal_clients(5, 2))
    assert [folder.name for folder in folders] == ["node-0", "node-1"]
    assert sorted(file.name for file in folders[1].iterdir()) == ["1-1.safetensors", "3-3.safetensors"]
    nodes = [loaded(infer_schema(digits), data=folder) for folder in folders]
    assert [node.numbers for node in nodes] == [(0, 2, 4), (1, 3)]
    for node in nodes:
        for k, u in enumerate(node.numbers):
            assert u is not None
            same_client(node.federation, k, digits, u)
    together = put_together(nodes, 5)
    runs = [
        fedattune.fit("fedavg", fed, rounds=2, batch_size=10, seed=0, epochs=1) for fed in (digits, together)
    ]
    for u in digits.names:
        one, other = (run.model(u).state_dict() for run in runs)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_exported_tables_and_names(tmp_path: Path) -> None:
    """Features of a table are exported as they are standardised, with the columns in the schema."""
    path = csv(tmp_path / "t.csv", [*rows(20, "a/ä"), *rows(30, "b", 5)])
    fed = federate(load_table(path, client_column="ward", target="ill"))
    (folder,) = export_clients(fed, tmp_path, [[1, 0]])
    assert sorted(file.name for file in folder.iterdir()) == ["0-a_ä.safetensors", "1-b.safetensors"]
    found = loaded(fed.schema, data=folder)
    assert found.federation.names == ("a/ä", "b")
    assert found.federation.schema == fed.schema
    for u in (0, 1):
        same_client(found.federation, u, fed, u)
    one = loaded(data=folder / "1-b.safetensors")
    assert one.numbers == (1,)
    same_client(one.federation, 0, fed, 1)
    other = fed.schema.model_copy(update={"numbers": ("size",)}) if fed.schema else None
    with pytest.raises(
        DataError, match=r"node-0 does not fit the schema: expected numbers \('size',\), got \('age',\)"
    ):
        loaded(other, data=folder)


def test_constants_of_the_schema_scale_samples_that_have_none(tmp_path: Path, ragged: Federation) -> None:
    (folder,) = export_clients(ragged, tmp_path, [[0]])
    plain = infer_schema(ragged)
    scaled = Schema.model_validate({**plain.model_dump(), "shift": [1.0], "scale": 2.0})
    index = torch.arange(3)
    before, after = (loaded(schema, data=folder).federation.features(index) for schema in (plain, scaled))
    assert torch.equal(after, (before - 1) * 2)


def test_refuses_to_export(tmp_path: Path, digits: Federation) -> None:
    for groups in ([[0], [5]], [[0, 1], [1]], [[-1]]):
        with pytest.raises(
            ConfigError, match="cannot go to a node: give each of the numbers 0 to 4 at most once"
        ):
            export_clients(digits, tmp_path, groups)
    with pytest.raises(ConfigError, match="node-1 has no clients"):
        export_clients(digits, tmp_path, [[0], []])
    assert not any(tmp_path.iterdir())
    export_clients(digits, tmp_path, [[0]])
    with pytest.raises(DataError, match="node-0 already holds clients"):
        export_clients(digits, tmp_path, [[1]])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write clients to"):
        export_clients(digits, tmp_path / "file", [[1]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no data; name a table"),
        ({"datta": "x"}, "unknown key 'datta'; did you mean 'data'"),
        ({"data": "digits", "client_columm": "x"}, "did you mean 'client-column'"),
        ({"data": "digits", "clients": True}, "clients: input should be a number"),
        ({"data": "digits", "clients": 0}, "clients: .*greater than or equal to 1, got 0"),
        (
            {"data": "digits", "target": "x", "client_column": "y"},
            "target and client-column goes only with a table",
        ),
        (
            {"data": "digits", "clients": 3, "take": "0 3"},
            "take: expected numbers of clients from 0 to 2.*got '3'",
        ),
        ({"data": "digits", "take": "a"}, "take: .*got 'a'"),
        ({"data": "digits", "take": "1 1"}, "take: a client is named twice"),
        ({"data": "digits", "test": 1.5}, "test must be a fraction"),
        ({"data": "digit"}, "no file or folder 'digit', and no such data set; did you mean 'digits'"),
        ({"data": "t.csv", "take": "0"}, "take goes only with a known data set, not with 't.csv'"),
        ({"data": "t.csv"}, r"the table t.csv needs the column to predict: add target='COLUMN'"),
        (
            {"data": "t.csv", "target": "ill"},
            "the table t.csv needs the client's name, name='...', or the column",
        ),
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
    with pytest.raises(DataError, match="client 'x' has 20 samples, all of class 'y'"):
        loaded(schema, data=csv(tmp_path / "t.csv", rows(1) * 20), name="x")


def test_clients_of_one_node_must_fit_together(
    tmp_path: Path, ragged: Federation, digits: Federation
) -> None:
    export_clients(ragged, tmp_path / "a", [[0]])
    export_clients(digits, tmp_path / "b", [[1]])
    (tmp_path / "b" / "node-0" / "1-1.safetensors").rename(tmp_path / "a" / "node-0" / "1-1.safetensors")
    with pytest.raises(
        DataError, match="client '1' differs from client '0' in classes and input_shape and scale"
    ):
        loaded(data=tmp_path / "a" / "node-0")
    with pytest.raises(DataError, match="digits does not fit the schema: expected classes"):
        loaded(infer_schema(ragged), data="digits")


@pytest.mark.parametrize(
    ("tensors", "about", "message"),
    [
        (None, None, "cannot be read as safetensors"),
        ({}, {"kind": "else"}, "is no client of fedattune: expected a file of the kind .*got 'else'"),
        ({"x": None}, {}, "is no client of fedattune: .*with test, train, validation, y;"),
        ({}, {"number": "-1"}, "the client's number must be 0 or more, got '-1'"),
        ({}, {"schema": "{}"}, "the schema: classes: field required"),
        (
            {},
            {"schema": '{"classes":["a","b","c"],"input_shape":[2]}'},
            r"shape \(5,\), but its schema says \(2,\)",
        ),
        ({}, {"schema": '{"classes":["a","b"],"input_shape":[5]}'}, "has label 2, but the 2 classes"),
        ({"x": torch.full((14, 5), torch.nan)}, {}, "NaN or an infinite value"),
        ({"train": torch.tensor([0.5])}, {}, r"train must be int64 indices of shape \(n,\), got float32"),
        ({"train": torch.tensor([0, 14])}, {}, r"client '0' has indices outside \[0, 14\)"),
        ({"train": torch.tensor([0, 0])}, {}, "client '0' holds a sample twice"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, {}, "14 samples but 3 labels"),
    ],
)
def test_refuses_client_files(
    tmp_path: Path, ragged: Federation, tensors: Any, about: Any, message: str
) -> None:
    export_clients(ragged, tmp_path, [[0]])
    path = tmp_path / "node-0" / "0-0.safetensors"
    if tensors is None:
        path.write_bytes(b"no safetensors")
    else:
        held = {key: value for key, value in (load_file(path) | tensors).items() if value is not None}
        schema = infer_schema(ragged).to_json()
        save_file(
            held, path, {"kind": "fedattune client 1", "name": "0", "number": "0", "schema": schema} | about
        )
    with pytest.raises(DataError, match=message):
        loaded(data=path)
