"""Building federations: partitions by name, clients that are too small, and what is refused."""

import pytest

from data.small_sets import images, owned
from fedattune import ConfigError, DataError
from fedattune.data import partition_dataset


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"partition": "dirichelt"}, ConfigError, "did you mean 'dirichlet'"),
        ({"partition": "dirichlet", "options": {"bata": 1}}, ConfigError, "did you mean 'beta'"),
        ({"partition": "by_column"}, DataError, "no clients of its own"),
        ({"partition": "iid", "clients": 0}, ConfigError, "at least 1"),
        ({"partition": "iid", "clients": 1}, DataError, "toy: a federation needs at least two clients"),
        ({"partition": "two_class", "clients": 4, "seed": 2**32}, DataError, r"below 2\*\*32, got 4294967296"),
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
