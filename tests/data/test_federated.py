"""Federation, federate and saved partitions."""

import json

import numpy as np
import pytest
import torch

from fedattune import ConfigError, DataError, Federation, load_federation
from fedattune.data import (
    Dataset,
    federate,
    list_partitions,
    load_manifest,
    restore_federation,
    save_manifest,
    split_parts,
)
from fedattune.data.client_index import Client, hash_manifest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))


def images(n=200, **more):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (n, 1, 2, 2), dtype=np.uint8)
    return Dataset("toy", x, np.arange(n) % 4, ("a", "b", "c", "d"), **more)


def owned(sizes, y=None):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    n = len(owner)
    x = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
    labels = np.arange(n) % 2 if y is None else np.asarray(y)
    return Dataset("own", x, labels, ("no", "yes"), owner=owner, owners=tuple("ABCDEFGHIJ"[: len(sizes)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(3, dtype=np.int64)}, "4 samples but 3 labels"),
        ({"y": np.zeros(4)}, "int64"),
        ({"y": np.array([0, 1, 2, 0])}, "row 2 has label 2"),
        ({"x": np.zeros((4, 2))}, "uint8 or float32"),
        ({"x": np.zeros(4, dtype=np.float32)}, "shape"),
        ({"x": np.array([[1], [np.inf], [-np.inf], [0]], dtype=np.float32)}, "row 1 holds NaN"),
        ({"scale": np.ones((3,), dtype=np.float32)}, "scale of shape"),
        ({"shift": np.ones((1, 2, 2), dtype=np.float32)}, "shift of shape"),
        ({"owner": np.array([0, 0, 1, 2]), "owners": ("a", "b")}, "owners"),
        ({"owner": np.array([0]), "owners": ("a",)}, "1 owners"),
        ({"x": np.zeros((0, 2), dtype=np.float32), "y": np.zeros(0, dtype=np.int64)}, "no samples"),
    ],
)
def test_dataset_refuses(change, message):
    good = {"x": np.zeros((4, 2), dtype=np.float32), "y": np.array([0, 1, 0, 1]), "classes": ("a", "b")}
    Dataset("good", **good)
    with pytest.raises(DataError, match=message):
        Dataset("bad", **(good | change))


def test_split_sizes_and_determinism():
    rows = np.arange(100, 147)
    train, validation, test = split_parts(rows, seed=3, client=5)
    assert len(train) + len(validation) == int(0.75 * 47)
    assert len(validation) == int(0.1 * 35)
    assert sorted(np.concatenate([train, validation, test])) == rows.tolist()
    assert np.array_equal(split_parts(rows, seed=3, client=5)[0], train)
    assert not np.array_equal(split_parts(rows, seed=3, client=6)[0], train)
    assert len(split_parts(np.arange(10), test=0.3, validation=0.0, seed=0, client=0)[0]) == 7
    with pytest.raises(DataError, match="client 0 has 1 samples"):
        split_parts(np.arange(1), seed=0, client=0)


def test_federation_properties():
    data = images(shift=np.full((1, 1, 1), 10, np.float32), scale=np.full((1, 1, 1), 0.5, np.float32))
    fed = federate(data, partition="iid", clients=4)
    assert (fed.n_clients, fed.n_classes, fed.input_shape) == (4, 4, (1, 2, 2))
    assert fed.names == ("0", "1", "2", "3")
    assert fed.device.type == "cpu"
    assert fed.sizes("train").tolist() == [34] * 4
    assert fed.sizes("validation").tolist() == [3] * 4
    assert fed.sizes("test").tolist() == [13] * 4
    assert fed.label_counts().sum() == 200
    assert fed.label_counts("test").sum(axis=1).tolist() == [13] * 4
    index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    x = fed.features(index, torch.float64)
    assert x.shape == (2, 3, 1, 2, 2)
    assert torch.equal(x, (fed.x[index].double() - 10) * 0.5)
    assert fed.x.dtype == torch.uint8
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        fed.part("trian")


def test_features_leave_the_samples_alone():
    fed = federate(owned([20, 20]), test=0.5)
    before = fed.x.clone()
    fed.features(torch.arange(4)).zero_()
    assert torch.equal(fed.x, before)


def test_to_another_device_keeps_the_manifest():
    fed = federate(images(), partition="iid", clients=4)
    assert fed.to("cpu") is fed
    moved = fed.to("meta")
    assert moved.x.device.type == "meta"
    assert moved.shift is None
    assert moved.manifest() == fed.manifest()
    assert federate(images(), partition="iid", clients=4).manifest() == fed.manifest()
    other = federate(images(), partition="iid", clients=4, seed=1).manifest()
    assert other["hash"] != fed.manifest()["hash"]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([("a", [0], [1]), ("a", [2], [3])], "names repeat: a"),
        ([("a", [0], [9])], "'a' has indices outside"),
        ([("a", [0], [0])], "'a' holds a sample twice"),
    ],
)
def test_federation_refuses(clients, message):
    def rows(values):
        return np.array(values, dtype=np.int64)

    made = tuple(Client(name, rows(train), rows([]), rows(test)) for name, train, test in clients)
    with pytest.raises(DataError, match=message):
        Federation("bad", torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), ("a",), made)


def test_heterogeneity_of_equal_and_of_disjoint_clients():
    same = federate(owned([40, 40])).heterogeneity()
    assert (same["label_distance"], same["label_distance_pairs"]) == (0, 0)
    assert (same["clients"], same["samples_min"], same["samples_median"], same["classes_max"]) == (
        2,
        40,
        40,
        2,
    )
    rows = [np.arange(i, i + 10) for i in (0, 10)]
    none = np.zeros(0, dtype=np.int64)
    apart = Federation(
        "apart",
        torch.zeros(20, 1),
        torch.arange(20) // 10,
        ("a", "b"),
        tuple(Client(str(i), r, none, none) for i, r in enumerate(rows)),
    ).heterogeneity()
    assert apart["label_distance"] == pytest.approx(0.5)
    assert apart["label_distance_pairs"] == pytest.approx(1.0)


def test_default_partition_and_numbers():
    assert images().default_partition == "dirichlet"
    assert images().default_clients == 10
    assert images(10_000).default_clients == 20
    fed = federate(owned([20, 30]))
    assert fed.partition["name"] == "by_column"
    assert fed.names == ("A", "B")
    labels = federate(images(400), partition="two_class", clients=4)
    assert labels.partition["seed"] == 1
    assert labels.partition["options"] == {"protocol": "A"}


def test_small_clients_are_named_or_dropped():
    data = owned([20, 1, 20, 4], y=[0, 1] * 10 + [0] + [0, 1] * 10 + [1] * 4)
    with pytest.raises(
        DataError, match=r"client 'B' has 1 sample, 0 to train.*'D' has 4.*'yes'.*small-clients drop"
    ):
        federate(data)
    fed = federate(data, small_clients="drop")
    assert fed.names == ("A", "C")
    assert "2 of 4 clients are left out" in fed.notes[0]
    whole = federate(owned([20, 20, 20, 20]))
    assert len(whole.clients[2].train) == len(fed.clients[1].train)
    with pytest.raises(DataError, match="no client is left"):
        federate(owned([1, 1]), small_clients="drop")
    with pytest.raises(ConfigError, match="small_clients"):
        federate(data, small_clients="keep")
    with pytest.raises(DataError, match="and 3 more"):
        federate(owned([1] * 8))


def test_label_partitions_note_single_classes_and_missing_validation():
    x = np.zeros((40, 1), dtype=np.float32)
    lone = Dataset("lone", x, np.repeat([0, 1], [39, 1]), ("a", "b"))
    fed = federate(lone, partition="iid", clients=8)
    assert "7 of 8 clients hold a single class: " in fed.notes[0]
    assert "and 2 more" in fed.notes[0]
    assert "1 of 2 clients have no validation part: B" in federate(owned([40, 8])).notes[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"partition": "dirichelt"}, ConfigError, "did you mean 'dirichlet'"),
        ({"partition": "dirichlet", "options": {"bata": 1}}, ConfigError, "did you mean 'beta'"),
        ({"partition": "by_column"}, DataError, "no clients of its own"),
        ({"partition": "iid", "clients": 0}, ConfigError, "at least 1"),
        ({"partition": "iid", "clients": 1}, DataError, "toy: a federation needs at least two clients"),
        (
            {"partition": "two_class", "clients": 4, "seed": 2**32},
            DataError,
            r"below 2\*\*32, got 4294967296",
        ),
        ({"partition": "iid", "test": 0.0}, ConfigError, "test must be"),
        ({"partition": "iid", "validation": 1.0}, ConfigError, "validation must be"),
        ({"partition": "iid", "seed": -1}, ConfigError, "seed must be"),
    ],
)
def test_federate_refuses(options, error, message):
    with pytest.raises(error, match=message):
        federate(images(), **options)


def test_natural_clients_have_a_fixed_number():
    assert federate(owned([20, 20]), clients=2).n_clients == 2
    with pytest.raises(ConfigError, match="comes with 2 clients"):
        federate(owned([20, 20]), clients=3)


def test_manifest_round_trip():
    fed = federate(images(), partition="iid", clients=4, seed=7, validation=0.2)
    path = save_manifest(fed, "mine")
    assert save_manifest(fed, "mine") == path
    assert list_partitions() == ["mine"]
    for name in ("mine", str(path)):
        again = federate(images(), partition=name)
        assert torch.equal(again.x, fed.x)
        assert again.manifest() == fed.manifest()
    assert federate(images(), partition="mine", clients=4).partition["seed"] == 7
    with pytest.raises(ConfigError, match="has 4 clients, not 5"):
        federate(images(), partition="mine", clients=5)
    with pytest.raises(ConfigError, match="takes no options, got beta"):
        federate(images(), partition="mine", options={"beta": 1})
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        federate(images(), partition="mina")
    with pytest.raises(DataError, match="another partition"):
        save_manifest(federate(images(), partition="iid", clients=2), "mine")
    with pytest.raises(DataError, match="made for 'toy' with 200"):
        federate(images(100), partition="mine")


def test_manifest_that_is_broken_or_changed(tmp_path):
    fed = federate(images(), partition="iid", clients=2)
    path = save_manifest(fed, tmp_path / "deep" / "m.json")
    content = json.loads(path.read_text())
    content["clients"][0]["train"][0], content["clients"][0]["test"][0] = (
        content["clients"][0]["test"][0],
        content["clients"][0]["train"][0],
    )
    with pytest.raises(DataError, match="changed since"):
        restore_federation(images(), content)
    del content["clients"][0]["train"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"clients.0.train"):
        load_manifest(path)
    path.write_text("{")
    with pytest.raises(DataError, match="not a saved partition"):
        load_manifest(path)
    with pytest.raises(DataError, match="cannot read"):
        load_manifest("nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        save_manifest(fed, tmp_path / "file" / "m.json")


def test_load_federation():
    fed = load_federation()
    assert (fed.name, fed.n_clients, fed.input_shape, fed.x.dtype) == ("digits", 10, (1, 8, 8), torch.uint8)
    assert float(fed.features(torch.arange(50)).max()) == 1.0
    synthetic = load_federation("synthetic", clients=5)
    assert synthetic.n_clients == 5
    assert load_federation("synthetic", clients=3, partition="iid", options={"clients": 4}).n_clients == 3


def test_a_federation_has_at_least_two_clients():
    with pytest.raises(DataError, match="synthetic: a federation needs at least two clients"):
        load_federation("synthetic", clients=1)
    with pytest.raises(DataError, match="only 'A' after 1 too small"):
        federate(owned([20, 1]), small_clients="drop")
    one = federate(images(), partition="iid", clients=2).manifest()
    del one["clients"][1], one["hash"]
    with pytest.raises(DataError, match="toy: a federation needs at least two clients"):
        restore_federation(images(), one | {"hash": hash_manifest(one)})


@pytest.mark.parametrize("option", ["alpha", "beta"])
@pytest.mark.parametrize("value", [1e308, -1, 100.1])
def test_synthetic_deviations_are_bounded(option, value):
    with pytest.raises(ConfigError, match=f"synthetic.{option}: input should be .*got"):
        load_federation("synthetic", options={option: value})
