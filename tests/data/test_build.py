"""Building federations: partitions by name, clients that are too small, and what is refused."""

import numpy as np
import pytest
import torch

from data.small_sets import images, owned
from fedattune import ConfigError, DataError, load_federation
from fedattune.data import (
    Dataset,
    partition_dataset,
    restore_federation,
)
from fedattune.data.client_index import hash_manifest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))


def test_default_partition_and_numbers():
    assert images().default_partition == "dirichlet"
    assert images().default_clients == 10
    assert images(10_000).default_clients == 20
    fed = partition_dataset(owned([20, 30]))
    assert fed.partition["name"] == "by_column"
    assert fed.names == ("A", "B")
    labels = partition_dataset(images(400), partition="two_class", clients=4)
    assert labels.partition["seed"] == 1
    assert labels.partition["options"] == {"protocol": "A"}


def test_small_clients_are_named_or_dropped():
    data = owned([20, 1, 20, 4], y=[0, 1] * 10 + [0] + [0, 1] * 10 + [1] * 4)
    with pytest.raises(DataError, match=r"client 'B' has 1 sample, 0 to train.*small-clients drop"):
        partition_dataset(data, small_clients="error")
    fed = partition_dataset(data)  # natural clients: nobody chose them so small
    assert fed.names == ("A", "C", "D")
    assert "1 of 4 clients are left out" in fed.notes[0]
    assert "1 of 3 clients holds a single class: D" in fed.notes[1]
    whole = partition_dataset(owned([20, 20, 20, 20]))
    assert len(whole.clients[2].train) == len(fed.clients[1].train)
    with pytest.raises(DataError, match="no client is left"):
        partition_dataset(owned([1, 1]), small_clients="drop")
    with pytest.raises(ConfigError, match="small_clients"):
        partition_dataset(data, small_clients="keep")
    with pytest.raises(DataError, match="and 3 more"):
        partition_dataset(owned([1] * 8), small_clients="error")


def test_label_partitions_note_single_classes_and_missing_validation():
    x = np.zeros((40, 1), dtype=np.float32)
    lone = Dataset("lone", x, np.repeat([0, 1], [39, 1]), ("a", "b"))
    fed = partition_dataset(lone, partition="iid", clients=8)
    assert "7 of 8 clients hold a single class: " in fed.notes[0]
    assert "and 2 more" in fed.notes[0]
    assert "1 of 2 clients have no validation part: B" in partition_dataset(owned([40, 8])).notes[0]


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
        partition_dataset(images(), **options)


def test_natural_clients_have_a_fixed_number():
    assert partition_dataset(owned([20, 20]), clients=2).n_clients == 2
    with pytest.raises(ConfigError, match="has 2 clients of its own, got 3"):
        partition_dataset(owned([20, 20]), clients=3)


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
        partition_dataset(owned([20, 1]), small_clients="drop")
    one = partition_dataset(images(), partition="iid", clients=2).manifest()
    del one["clients"][1], one["hash"]
    with pytest.raises(DataError, match="toy: a federation needs at least two clients"):
        restore_federation(images(), one | {"hash": hash_manifest(one)})
