"""Partitions: equal shares, natural clients, and options that cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import covers
from fedattune import ConfigError, DataError, load_federation
from fedattune.data.partitions import by_column, iid
from fedattune.data.splits import group_rows


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        ("shards", {"deal": "even"}, "shards.deal"),
        ("shards", {"shards_per_client": 0}, "shards.shards_per_client"),
        ("dirichlet_clients", {"rho": 0}, "dirichlet_clients.rho"),
        ("dirichlet_clients", {"convention": "both"}, "dirichlet_clients.convention"),
        ("pfedla", {"setting": 3}, "pfedla.setting"),
        ("pfedla", {"dominant_share": 1.0}, "pfedla.dominant_share"),
        ("pfedla_similarity", {"study": "heat"}, "pfedla_similarity.study"),
    ],
)
def test_options_that_cannot_be(partition, options, message):
    with pytest.raises(ConfigError, match=message):
        load_federation("digits", partition=partition, options=None, partition_options=options)


def test_similarity_study_has_eight_clients_unless_told_otherwise():
    assert load_federation("digits", partition="pfedla_similarity").n_clients == 8
    assert load_federation("digits", partition="pfedla_similarity", clients=5).n_clients == 5


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 200), n_clients=st.integers(1, 20), seed=st.integers(0, 9))
def test_iid_is_even(n, n_clients, seed):
    labels = np.zeros(n, dtype=np.int64)
    if n_clients > n:
        with pytest.raises(DataError, match="take fewer"):
            iid(labels, n_clients, seed)
        return
    parts = iid(labels, n_clients, seed)
    assert covers(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_by_column_groups_by_value():
    owner = np.array([2, 0, 2, 1])
    assert [p.tolist() for p in by_column(owner, 4, 0)] == [[1], [3], [0, 2], []]
    assert [p.tolist() for p in group_rows(owner)] == [[1], [3], [0, 2]]
