"""Sort and partition: oracle F3."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import CIFAR10_TRAIN, count_labels, labels_with
from fedattune import DataError
from fedattune.data.partitions.shards import shards


@pytest.mark.parametrize("n_clients", [10, 100])
def test_f3_shards_are_two_per_client_of_different_labels_and_equal_sizes(n_clients):
    counts = count_labels(CIFAR10_TRAIN, shards(CIFAR10_TRAIN, n_clients, 0))
    shard = 50_000 // (2 * n_clients)
    assert counts.sum() == 50_000
    assert all(sorted(row[row > 0]) == [shard, shard] for row in counts)
    assert ((counts > 0).sum(axis=0) == 2 * n_clients / 10).all()  # every class as often


@settings(max_examples=30, deadline=None)
@given(k=st.integers(2, 7), group=st.integers(1, 3), per_client=st.integers(1, 8), seed=st.integers(0, 99))
def test_f3_labels_differ_wherever_they_can(k, group, per_client, seed):
    n_clients = k * group
    labels = labels_with([4 * group * per_client] * k, seed)  # group x per_client shards of 4 for each label
    if per_client > k:  # more than there are clients
        with pytest.raises(DataError, match="cannot all have different labels"):
            shards(labels, n_clients, seed, shards_per_client=per_client)
        return
    counts = count_labels(labels, shards(labels, n_clients, seed, shards_per_client=per_client))
    assert set(counts.reshape(-1)) <= {0, 4}
    assert ((counts == 4).sum(axis=1) == per_client).all()


def test_paired_deal_is_igfls_second_population():
    counts = count_labels(CIFAR10_TRAIN, shards(CIFAR10_TRAIN, 10, 0, deal="paired"))
    expected = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7), (8, 9), (8, 9)]
    assert [tuple(np.flatnonzero(row)) for row in counts] == expected
    assert set(counts[counts > 0]) == {2500}
    threes = labels_with([20] * 6)
    counts = count_labels(threes, shards(threes, 4, 0, deal="paired", shards_per_client=3))
    assert [tuple(np.flatnonzero(row)) for row in counts] == [(0, 1, 2)] * 2 + [(3, 4, 5)] * 2


@pytest.mark.parametrize(
    ("counts", "n_clients", "options", "message"),
    [
        ([5, 5], 6, {}, "10 samples cannot be cut into 12 shards, 2 for each of 6 clients"),
        ([80, 8, 8], 4, {}, "7 of 8 shards have the label 0, so 4 clients cannot .*shards.distinct=false"),
        ([50] * 10, 12, {"deal": "paired"}, "paired deal of 2 shards to 12 clients .* with 2 to 3 shards"),
        ([60] * 5, 5, {"deal": "paired"}, r"labels in groups of 2 .*shards.deal=random"),
    ],
)
def test_shards_that_cannot_be(counts, n_clients, options, message):
    with pytest.raises(DataError, match=message):
        shards(labels_with(counts), n_clients, 0, **options)


def test_f3_swaps_are_bounded(monkeypatch):
    monkeypatch.setitem(shards.__globals__, "MAX_SWAPS", 0)
    with pytest.raises(DataError, match="no deal of 2 different labels to each of 10 clients was found"):
        shards(labels_with([20] * 10), 10, 0)
