"""Saved partitions."""

import json

import pytest
import torch

from data.small_sets import images
from fedattune import ConfigError, DataError
from fedattune.data import list_partitions, load_manifest, partition_dataset, restore_federation, save_manifest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDATTUNE_HOME", str(tmp_path / "home"))


def test_manifest_round_trip():
    fed = partition_dataset(images(), partition="iid", clients=4, seed=7, validation=0.2)
    path = save_manifest(fed, "mine")
    assert save_manifest(fed, "mine") == path
    assert list_partitions() == ["mine"]
    for name in ("mine", str(path)):
        again = partition_dataset(images(), partition=name)
        assert torch.equal(again.x, fed.x)
        assert again.manifest() == fed.manifest()
    assert partition_dataset(images(), partition="mine", clients=4).partition["seed"] == 7
    with pytest.raises(ConfigError, match="has 4 clients, not 5"):
        partition_dataset(images(), partition="mine", clients=5)
    with pytest.raises(ConfigError, match="takes no options, got beta"):
        partition_dataset(images(), partition="mine", options={"beta": 1})
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        partition_dataset(images(), partition="mina")
    with pytest.raises(DataError, match="another partition"):
        save_manifest(partition_dataset(images(), partition="iid", clients=2), "mine")
    with pytest.raises(DataError, match="made for 'toy' with 200"):
        partition_dataset(images(100), partition="mine")


def test_manifest_that_is_broken_or_changed(tmp_path):
    fed = partition_dataset(images(), partition="iid", clients=2)
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
