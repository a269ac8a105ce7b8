"""Data sets known by name."""

import numpy as np
import pytest

from data.table_files import N, columns, parquet
from fedattune import ConfigError
from fedattune.data import load_data
from fedattune.data.sources import synthetic


def test_synthetic_has_the_papers_sizes():
    data = synthetic(None)
    sizes = np.bincount(data.owner)
    assert sizes[:10].tolist() == [9545, 855, 2180, 24380, 11685, 285, 2075, 450, 470, 870]
    assert (sizes.min(), sizes.max(), sizes.sum()) == (250, 25810, 205_795)
    assert int((0.75 * sizes).astype(int).sum()) == 154_314
    with pytest.raises(ValueError, match="seed"):
        synthetic(None, seed=-1)


def test_load_tells_tables_from_names(tmp_path):
    path = parquet(tmp_path, columns())
    assert load_data(path, client_column="site", target="ill", options={"features": ["age"]}).x.shape == (N, 1)
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
