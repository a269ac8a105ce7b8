"""Partitions by Dirichlet distributions: oracles F2 and F4."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import count_labels, covers, labels_with
from fedattune import DataError, load_federation
from fedattune.data.partitions import dirichlet
from fedattune.data.partitions.dirichlet import _draw_counts, _fill_up, dirichlet_clients


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


@pytest.mark.parametrize("beta", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("counts", [[180] * 10, [800, 400, 200, 100, 50, 20]])
def test_dirichlet_repairs_what_draws_do_not_give(beta, counts):
    """Twenty clients of a handful of classes: three draws never give each of them its minimum."""
    labels = labels_with(counts)
    minimum = len(labels) / 20 / 2
    for seed in range(12):
        parts = dirichlet(labels, 20, seed, beta=beta, max_tries=30)
        assert covers(parts, len(labels))
        assert min(map(len, parts)) >= min(40, minimum)
        again = dirichlet(labels, 20, seed, beta=beta, max_tries=30)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    # The clients are still unlike: few classes each.
    assert np.median((count_labels(labels, parts) > 0).sum(axis=1)) <= len(counts) / 2


def test_repairs_move_no_more_than_is_lacking():
    counts = np.array([[10, 0, 30], [0, 1, 5], [0, 0, 14]])
    _fill_up(counts, 10)
    # The second client lacks nine: five of the class that both hold, then four of the largest client's first class.
    assert counts.tolist() == [[10, 4, 26], [0, 6, 0], [0, 0, 14]]


@pytest.mark.parametrize("seed", [8, 9, 11])
def test_dirichlet_of_digits_succeeds_for_seeds_that_failed(seed):
    fed = load_federation("digits", partition="dirichlet", clients=20, seed=seed)
    assert int(fed.label_counts().sum(axis=1).min()) == 40


def test_dirichlet_says_what_to_change():
    labels = labels_with([40] * 5)
    with pytest.raises(DataError, match=r"no division in 1 tries.*larger dirichlet.beta"):
        dirichlet(labels, 2, 4, beta=0.001, max_tries=1)
    with pytest.raises(DataError, match=r"smaller dirichlet\.min_size"):
        dirichlet(labels, 10, 0, min_size=21)
    with pytest.raises(DataError, match="200 samples cannot give 300 clients"):
        dirichlet(labels, 300, 0)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    n_clients=st.integers(1, 8),
    rho=st.floats(1e-6, 1000),
    convention=st.sampled_from(["symmetric", "prior"]),
    seed=st.integers(0, 99),
)
def test_f4_equal_sizes_and_each_sample_once(counts, n_clients, rho, convention, seed):
    labels = labels_with(counts, seed)
    if n_clients > len(labels):
        return
    parts = dirichlet_clients(labels, n_clients, seed, rho=rho, convention=convention)
    assert count_labels(labels, parts).sum(axis=1).tolist() == [len(labels) // n_clients] * n_clients
    again = dirichlet_clients(labels, n_clients, seed, rho=rho, convention=convention)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(("convention", "alpha"), [("symmetric", 1.0), ("prior", 0.1)])
def test_f4_two_samples_agree_as_often_as_the_concentration_says(convention, alpha):
    # Two draws from q ~ Dir(alpha x 10) are of one class with probability (1 + alpha) / (1 + 10 alpha): 2/11
    # for rho = 1 per class, 1.1/2 for rho/10. The first client finds every class unused.
    labels = labels_with([20] * 10)
    agree = []
    for seed in range(400):
        first = labels[dirichlet_clients(labels, 10, seed, rho=1.0, convention=convention)[0]]
        n = np.bincount(first)
        agree.append((n * (n - 1)).sum() / (20 * 19))
    assert np.mean(agree) == pytest.approx((1 + alpha) / (1 + 10 * alpha), abs=0.04)


def test_exhausted_classes_are_removed_and_the_others_renormalised():
    random = np.random.default_rng(0)
    assert _draw_counts(np.array([1.0, 0.0]), np.array([3, 10]), 5, random).tolist() == [3, 2]
    assert _draw_counts(np.array([0.5, 0.5, 0.0]), np.array([0, 2, 9]), 2, random).tolist() == [0, 2, 0]
    # One sample of class 0, q = 1/2, 3/8, 1/8. Classes 0 and 1, once each: first 0, then 1 with (3/8)/(1/2), or
    # first 1, then 0: 1/2 x 3/4 + 3/8 x 1/2 = 9/16.
    q, left = np.array([1 / 2, 3 / 8, 1 / 8]), np.array([1, 9, 9])
    drawn = [tuple(_draw_counts(q, left, 2, random)) for _ in range(3000)]
    assert drawn.count((1, 1, 0)) / 3000 == pytest.approx(9 / 16, abs=0.04)
    assert max(n for n, _, _ in drawn) == 1


def test_dirichlet_clients_needs_a_sample_for_each():
    with pytest.raises(DataError, match="3 samples cannot be divided among 4 clients"):
        dirichlet_clients(labels_with([2, 1]), 4, 0)
