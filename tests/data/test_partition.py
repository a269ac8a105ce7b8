"""Partitions: oracles F1, F2, F5 and the exact sizes of the papers' protocols."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedattune import DataError
from fedattune.data.partitions import _dirichlet_counts, by_column, dirichlet, iid, two_class
from fedattune.data.sources import synthetic
from fedattune.data.splits import group_rows

MNIST_COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
TOTALS = {
    "mnist": "5112 4988 3890 4254 3216 3073 3272 3014 3882 4358 "
    "2942 1556 2203 1853 1782 3653 4315 4030 4180 4427",
    "fashion": "4957 4962 3409 4115 6162 2947 3251 4545 3666 3111 "
    "2841 1539 2345 2385 1579 3255 4248 3701 3834 3148",
    "cifar10": "5252 3376 5114 3975 4482 2298 3433 2015 2254 3606 "
    "1094 1689 1619 2205 1371 3356 3502 3252 3566 2541",
}
COUNTS = {"mnist": MNIST_COUNTS, "fashion": [7000] * 10, "cifar10": [6000] * 10}


def labels_with(counts, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def covers(parts, n):
    joint = np.concatenate(parts)
    return len(joint) == n and len(np.unique(joint)) == n


@pytest.mark.parametrize("name", TOTALS)
def test_protocol_a_has_the_papers_sizes(name):
    labels = labels_with(COUNTS[name])
    parts = two_class(labels, 20, 1)
    assert [len(p) for p in parts] == [int(v) for v in TOTALS[name].split()]
    assert covers(parts, len(labels))


def test_protocol_a_has_two_classes_each_in_five_groups_of_four():
    labels = labels_with(MNIST_COUNTS)
    held = [tuple(np.unique(labels[p])) for p in two_class(labels, 20, 1)]
    assert held == [(2 * u % 10, 2 * u % 10 + 1) for u in range(20)]


def test_protocol_b_overlaps_and_has_the_printed_range():
    labels = labels_with(MNIST_COUNTS)
    parts = two_class(labels, 20, 1, protocol="B")
    train = [3 * len(p) // 4 for p in parts]
    assert (min(train), max(train)) == (1165, 3834)
    assert len(np.unique(np.concatenate(parts))) < sum(map(len, parts))
    assert all(set(labels[p]) == {u % 10, (u + 1) % 10} for u, p in enumerate(parts))


def test_two_class_names_the_numbers_that_work():
    with pytest.raises(DataError, match=r"10 classes to 12 clients.*10, 15, 20"):
        two_class(labels_with([50] * 10), 12, 1)
    with pytest.raises(DataError, match="clients that work: 3, 6"):
        two_class(labels_with([50] * 3), 2, 1)
    with pytest.raises(DataError, match="cannot cut class 1 with 2 samples"):
        two_class(labels_with([50, 2]), 4, 1)


def test_synthetic_has_the_papers_sizes():
    data = synthetic(None)
    sizes = np.bincount(data.owner)
    assert sizes[:10].tolist() == [9545, 855, 2180, 24380, 11685, 285, 2075, 450, 470, 870]
    assert (sizes.min(), sizes.max(), sizes.sum()) == (250, 25810, 205_795)
    assert int((0.75 * sizes).astype(int).sum()) == 154_314
    with pytest.raises(ValueError, match="seed"):
        synthetic(None, seed=-1)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(30, 120), min_size=2, max_size=6),
    n_clients=st.integers(1, 8),
    beta=st.floats(0.3, 100),
    seed=st.integers(0, 99),
)
def test_dirichlet_is_disjoint_covers_and_has_its_least_size(counts, n_clients, beta, seed):
    labels = labels_with(counts, seed)
    parts = dirichlet(labels, n_clients, seed, beta=beta, min_size=2)
    assert len(parts) == n_clients
    assert covers(parts, len(labels))
    assert min(map(len, parts)) >= 2
    again = dirichlet(labels, n_clients, seed, beta=beta, min_size=2)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_dirichlet_default_least_size_and_skew():
    labels = labels_with([600] * 10)
    sparse, even = dirichlet(labels, 10, 0), dirichlet(labels, 10, 0, beta=1000.0)
    assert min(map(len, sparse)) >= 40

    def held(parts):
        return np.mean([len(np.unique(labels[p])) for p in parts])

    assert held(sparse) < 7
    assert held(even) == 10


def test_dirichlet_gives_up_and_says_what_to_change():
    labels = labels_with([40] * 5)
    with pytest.raises(DataError, match=r"no division in 3 tries.*larger dirichlet.beta"):
        dirichlet(labels, 10, 0, beta=0.001, min_size=19, max_tries=3)
    with pytest.raises(DataError, match=r"smaller dirichlet\.min_size"):
        dirichlet(labels, 10, 0, min_size=21)
    with pytest.raises(DataError, match="200 samples cannot give 300 clients"):
        dirichlet(labels, 300, 0)


def test_dirichlet_draws_again_when_all_shares_fall_on_full_clients():
    drawn = [_dirichlet_counts([3, 3], 2, 1e-3, np.random.default_rng(seed)) for seed in range(20)]
    assert any(counts is None for counts in drawn)
    assert all(counts.sum(axis=1).tolist() == [3, 3] for counts in drawn if counts is not None)
    for seed in range(20):
        assert covers(dirichlet(labels_with([3, 3]), 2, seed, beta=1e-3, min_size=1), 6)


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
