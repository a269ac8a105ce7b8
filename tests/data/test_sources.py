"""Data sets known by name."""

import numpy as np
import pytest

from data.table_files import N, columns, parquet
from fedattune import ConfigError, load_federation
from fedattune.data import (
    is_table,
    load_data,
    resolve_source_name,
)
from fedattune.data.sources import synthetic


def test_synthetic_has_the_papers_sizes():
    data = synthetic(None)
    sizes = np.bincount(data.owner)
    assert sizes[:10].tolist() == [9545, 855, 2180, 24380, 11685, 285, 2075, 450, 470, 870]
    assert (sizes.min(), sizes.max(), sizes.sum()) == (250, 25810, 205_795)
    assert int((0.75 * sizes).astype(int).sum()) == 154_314
    with pytest.raises(ValueError, match="seed"):
        synthetic(None, seed=-1)


@pytest.mark.parametrize("option", ["alpha", "beta"])
@pytest.mark.parametrize("value", [1e308, -1, 100.1])
def test_synthetic_deviations_are_bounded(option, value):
    with pytest.raises(ConfigError, match=f"synthetic.{option}: input should be .*got"):
        load_federation("synthetic", options={option: value})


def test_load_tells_tables_from_names(tmp_path):
    path = parquet(tmp_path, columns())
    assert load_data(path, client_column="site", target="ill", options={"features": ["age"]}).x.shape == (
        N,
        1,
    )
    with pytest.raises(ConfigError, match=r"needs client_column \(--client-column\) and target"):
        load_data(path)
    with pytest.raises(ConfigError, match="table has no option 'feature'"):
        load_data(path, client_column="site", target="ill", options={"feature": ["age"]})
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load_data("digit")
    with pytest.raises(ConfigError, match="target goes only with a table"):
        load_data("digits", target="x")
    with pytest.raises(ConfigError, match="synthetic: seed"):
        load_data("synthetic", options={"seed": -1})
    with pytest.raises(ConfigError, match=r"unknown data 'me/mnist'.*cifar10.*ylecun/mnist.*Hugging Face"):
        load_data("me/mnist")


def test_names_of_known_data_win_over_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table_file = parquet(tmp_path, columns(), "digits")
    (tmp_path / "mine").write_bytes(table_file.read_bytes())
    assert len(load_data("digits").y) == 1797
    assert len(load_data("mine", client_column="site", target="ill", options={"features": "age"}).y) == N
    tables = {
        "digits": False,
        "mine": True,
        "T.CSV": True,
        "t.pq": True,
        "none": False,
        "ylecun/mnist": False,
    }
    assert {name: is_table(name) for name in tables} == tables
    assert is_table(tmp_path / "digits")
    assert resolve_source_name("uoft-cs/cifar100") == "cifar100"
