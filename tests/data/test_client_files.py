"""Files of one client each: what is written, read and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedattune
from data.nodes import loaded, same_client
from fedattune import ConfigError, DataError, Federation, load_federation
from fedattune.data import NodeData, deal_clients, export_clients, infer_schema
from fedattune.data.client_index import PARTS, Client


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load_federation("digits", clients=5, seed=1)


def test_divided() -> None:
    assert deal_clients(5, 2) == [[0, 2, 4], [1, 3]]
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
    runs = [fedattune.fit(fed, "fedavg", rounds=2, batch_size=10, seed=0, epochs=1) for fed in (digits, together)]
    for u in digits.names:
        one, other = (run.model(u).state_dict() for run in runs)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_refuses_to_export(tmp_path: Path, digits: Federation) -> None:
    for groups in ([[0], [5]], [[0, 1], [1]], [[-1]]):
        with pytest.raises(ConfigError, match="cannot go to a node: give each of the numbers 0 to 4 at most once"):
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
    ("tensors", "about", "message"),
    [
        (None, None, "cannot be read as safetensors"),
        ({}, {"kind": "else"}, "is no client of fedattune: expected a file of the kind .*got 'else'"),
        ({"x": None}, {}, "is no client of fedattune: .*with test, train, validation, y;"),
        ({}, {"number": "-1"}, "the client's number must be 0 or more, got '-1'"),
        ({}, {"schema": "{}"}, "the schema: classes: it has no default"),
        ({}, {"schema": '{"classes":["a","b","c"],"input_shape":[2]}'}, r"shape \(5,\), but its schema says \(2,\)"),
        ({}, {"schema": '{"classes":["a","b"],"input_shape":[5]}'}, "has label 2, but the 2 classes"),
        ({"x": torch.full((14, 5), torch.nan)}, {}, "NaN or an infinite value"),
        ({"train": torch.tensor([0.5])}, {}, r"train must be int64 indices of shape \(n,\), got float32"),
        ({"train": torch.tensor([0, 14])}, {}, r"client '0' has indices outside \[0, 14\)"),
        ({"train": torch.tensor([0, 0])}, {}, "client '0' holds a sample twice"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, {}, "14 samples but 3 labels"),
    ],
)
def test_refuses_client_files(tmp_path: Path, ragged: Federation, tensors: Any, about: Any, message: str) -> None:
    export_clients(ragged, tmp_path, [[0]])
    path = tmp_path / "node-0" / "0-0.safetensors"
    if tensors is None:
        path.write_bytes(b"no safetensors")
    else:
        held = {key: value for key, value in (load_file(path) | tensors).items() if value is not None}
        schema = infer_schema(ragged).to_json()
        save_file(held, path, {"kind": "fedattune client 1", "name": "0", "number": "0", "schema": schema} | about)
    with pytest.raises(DataError, match=message):
        loaded(data=path)
