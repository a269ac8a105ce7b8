"""Partitions: equal shares, natural clients, and options that cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import covers
from fedattune import DataError
from fedattune.data.partitions import iid


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
