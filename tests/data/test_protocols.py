"""Partitions of IGFL and pFedLA: oracles F3, F4 and F6, and the sizes of the papers' protocols."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedattune import ConfigError, DataError, load_federation
from fedattune.data import Dataset, federate, restore_federation, split_parts
from fedattune.data.partitions import _draw_counts, dirichlet_clients
from fedattune.data.partitions.pfedla import pfedla, pfedla_similarity
from fedattune.data.partitions.shards import shards


def labels_with(counts, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def table(labels, parts):
    """Label counts per client (N, classes), of parts that share no sample."""
    joint = np.concatenate(parts)
    assert len(np.unique(joint)) == len(joint)
    return np.stack([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


CIFAR10, CIFAR100 = labels_with([6000] * 10), labels_with([600] * 100)
CIFAR10_TRAIN = labels_with([5000] * 10)


# F3: sort and partition


@pytest.mark.parametrize("n_clients", [10, 100])
def test_f3_shards_are_two_per_client_of_different_labels_and_equal_sizes(n_clients):
    counts = table(CIFAR10_TRAIN, shards(CIFAR10_TRAIN, n_clients, 0))
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
    counts = table(labels, shards(labels, n_clients, seed, shards_per_client=per_client))
    assert set(counts.reshape(-1)) <= {0, 4}
    assert ((counts == 4).sum(axis=1) == per_client).all()


def test_without_distinct_some_client_has_two_shards_of_one_label():
    counts = table(CIFAR10_TRAIN, shards(CIFAR10_TRAIN, 100, 0, distinct=False))
    held = (counts > 0).sum(axis=1)
    assert set(held) == {1, 2}
    assert counts.sum() == 50_000


def test_paired_deal_is_igfls_second_population():
    counts = table(CIFAR10_TRAIN, shards(CIFAR10_TRAIN, 10, 0, deal="paired"))
    expected = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7), (8, 9), (8, 9)]
    assert [tuple(np.flatnonzero(row)) for row in counts] == expected
    assert set(counts[counts > 0]) == {2500}
    threes = labels_with([20] * 6)
    counts = table(threes, shards(threes, 4, 0, deal="paired", shards_per_client=3))
    assert [tuple(np.flatnonzero(row)) for row in counts] == [(0, 1, 2)] * 2 + [(3, 4, 5)] * 2


def test_samples_that_shards_do_not_divide_are_left_out_at_random():
    labels = labels_with([53, 50])
    parts = [shards(labels, 5, seed) for seed in range(30)]
    assert all(len(np.concatenate(p)) == 100 for p in parts)
    left = {c for p in parts for c in labels[np.setdiff1d(np.arange(103), np.concatenate(p))]}
    assert left == {0, 1}


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


# F4: Dirichlet per client


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
    assert table(labels, parts).sum(axis=1).tolist() == [len(labels) // n_clients] * n_clients
    again = dirichlet_clients(labels, n_clients, seed, rho=rho, convention=convention)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_f4_large_rho_is_close_to_uniform():
    counts = table(CIFAR10_TRAIN, dirichlet_clients(CIFAR10_TRAIN, 100, 0, rho=1000.0))
    chi_square = ((counts - 50) ** 2 / 50).sum(axis=1)
    # Nine degrees of freedom, 9 (500 + 10,000) / (1 + 10,000) = 9.45 on average, as long as no class runs out;
    # the last clients take what is left.
    assert chi_square[:80].mean() == pytest.approx(9.45, abs=1.5)
    assert (counts[:80] > 20).all()


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


# pFedLA


@pytest.mark.parametrize(
    ("labels", "n_clients", "classes", "each", "times"),
    [(CIFAR10, 100, 4, 150, 40), (CIFAR10, 10, 4, 150, 4), (CIFAR100, 100, 12, 50, 12)],
)
def test_pfedla_setting_1_has_few_classes_alike(labels, n_clients, classes, each, times):
    counts = table(labels, pfedla(labels, n_clients, 0))
    assert set(counts[counts > 0]) == {each}
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert ((counts > 0).sum(axis=0) == times).all()  # 100 clients take all 60,000 images


@pytest.mark.parametrize(
    ("labels", "dominant", "each", "others"), [(CIFAR10, 2, 150, 300 // 8), (CIFAR100, 6, 50, 300 // 94)]
)
def test_pfedla_setting_2_has_all_classes_and_dominant_ones(labels, dominant, each, others):
    counts = table(labels, pfedla(labels, 100, 0, setting=2))
    assert set(counts.reshape(-1)) == {each, others}
    assert ((counts == each).sum(axis=1) == dominant).all()
    often = (counts == each).sum(axis=0)
    assert often.max() - often.min() == 0
    shared = table(CIFAR10, pfedla(CIFAR10, 10, 0, setting=2, classes=3, dominant_share=0.9, size=200))
    assert set(shared.reshape(-1)) == {180 // 3, 20 // 7}
    assert set((shared == 60).sum(axis=0)) == {3}


@pytest.mark.parametrize("classes", [1, 3, 6, 7, 10])
def test_pfedla_chooses_classes_as_evenly_as_can_be(classes):
    labels = labels_with([50] * 10)
    held = table(labels, pfedla(labels, 7, 3, classes=classes)) > 0
    assert (held.sum(axis=1) == classes).all()
    assert held.sum(axis=0).max() - held.sum(axis=0).min() <= 1


def test_pfedla_takes_what_the_data_allow_unless_a_size_is_asked_for():
    labels = labels_with([40] * 10)
    counts = table(labels, pfedla(labels, 10, 0))
    assert set(counts[counts > 0]) == {10}  # every class is chosen four times
    assert table(labels, pfedla(labels, 10, 0, size=23)).sum(axis=1).tolist() == [20] * 10  # 5 of each
    with pytest.raises(
        DataError,
        match=r"10 clients of 600 samples need 600 of class 0, but there are 40; take pfedla.size=40 or less",
    ):
        pfedla(labels, 10, 0, size=600)
    for size in (40, 43):  # 43 gives no more: it is rounded down
        assert table(labels, pfedla(labels, 10, 0, size=size)).sum() == 400
    assert table(labels, pfedla(labels, 10, 0, size=39)).sum() == 360


def test_pfedla_names_the_smallest_size_that_gives_the_most():
    """10 clients, each class dominant for 2 of them and not for 8.

    Of 44 to 46 samples, 22 or 23 are dominant, 11 of each class, and the others get 2: 2 * 11 + 8 * 2 = 38 of a
    class. Of 43, dominant classes get 10. Of 47, the others get 3: 2 * 11 + 8 * 3 = 46, but there are 40.
    """
    labels = labels_with([40] * 10)
    with pytest.raises(DataError, match=r"take pfedla.size=44 or less"):
        pfedla(labels, 10, 0, setting=2, size=47)
    totals = [table(labels, pfedla(labels, 10, 0, setting=2, size=size)).sum() for size in (43, 44, 46)]
    assert totals == [360, 380, 380]


@pytest.mark.parametrize(
    ("counts", "n_clients", "options", "message"),
    [
        ([9] * 3, 2, {}, "cannot give each client 4 of 3 classes; take a smaller pfedla.classes"),
        ([9] * 3, 2, {"setting": 2, "classes": 3}, "3 of 3 classes and others"),
        ([9] * 10, 100, {}, "no sample is left for 100 clients"),
        ([9] * 10, 100, {"size": 40}, "but there are 9; take fewer clients"),
        ([90] * 10, 4, {"setting": 2, "dominant_share": 0.2}, "get 22 each and the other 8 get 22; all need"),
        ([90] * 10, 4, {"setting": 2, "size": 8}, "get 2 each and the other 8 get 0"),
    ],
)
def test_pfedla_that_cannot_be(counts, n_clients, options, message):
    with pytest.raises(DataError, match=message):
        pfedla(labels_with(counts), n_clients, 0, **options)


def test_heat_map_clients_have_neighbouring_classes():
    counts = table(CIFAR10, pfedla_similarity(CIFAR10, 8, 0))
    for u in range(8):
        assert set(np.flatnonzero(counts[u])) == {u % 10, (u + 1) % 10, (u + 2) % 10, (u + 3) % 10}
    assert set(counts[counts > 0]) == {150}


@pytest.mark.parametrize("seed", range(5))
def test_weights_study_has_an_equal_a_similar_and_strange_clients(seed):
    held = table(CIFAR10, pfedla_similarity(CIFAR10, 8, seed, study="weights")) > 0
    assert (held.sum(axis=1) == 4).all()
    assert (held & held[0]).sum(axis=1).tolist() == [4, 4, 3, 0, 0, 0, 0, 0]


def test_similarity_studies_that_cannot_be():
    with pytest.raises(DataError, match="needs data of 5 classes or more, got 4"):
        pfedla_similarity(labels_with([9] * 4), 8, 0)
    with pytest.raises(DataError, match="needs data of 8 classes or more"):
        pfedla_similarity(labels_with([9] * 7), 8, 0, study="weights")
    with pytest.raises(DataError, match="got 3 clients; take 4 or more"):
        pfedla_similarity(CIFAR10, 3, 0, study="weights")
    with pytest.raises(DataError, match=r"pfedla_similarity.size=4 or less"):
        pfedla_similarity(labels_with([4] * 10), 8, 0, size=80)


# F6: stratified parts


def test_f6_every_class_of_pfedla_is_divided_alike():
    data = Dataset("toy", np.zeros((60_000, 1), dtype=np.uint8), CIFAR10, tuple("abcdefghij"))
    fed = federate(data, partition="pfedla", clients=10, test=0.3, validation=0.2)
    held = fed.label_counts() > 0
    for part, each in (("train", 84), ("validation", 21), ("test", 45)):  # of 150: 0.7 x 0.8, 0.7 x 0.2, 0.3
        assert set(fed.label_counts(part)[held]) == {each}
    assert fed.partition["stratified"] is True
    assert restore_federation(data, fed.manifest()).manifest() == fed.manifest()
    loose = federate(data, partition="pfedla", clients=10, test=0.3, validation=0.2, stratify=False)
    assert len(set(loose.label_counts("test")[held])) > 1
    assert "stratified" not in loose.partition
    assert loose.sizes("test").tolist() == fed.sizes("test").tolist() == [180] * 10


def test_f6_stratified_split_rounds_and_keeps_the_sizes():
    labels = np.array([0, 1, 2] * 3)
    train, validation, test = split_parts(
        np.arange(10, 19), test=0.5, validation=0.3, seed=1, client=2, labels=labels
    )
    assert (len(train), len(validation), len(test)) == (3, 1, 5)  # floor(9/2) = 4, floor(0.3 x 4) = 1
    assert sorted(np.concatenate([train, validation, test])) == list(range(10, 19))
    kept = np.bincount(labels[np.concatenate([train, validation]) - 10])
    assert sorted(kept) == [1, 1, 2]  # 4/3 each
    extra = set()
    for client in range(30):
        first, *_ = split_parts(np.arange(9), test=0.5, validation=0.0, seed=0, client=client, labels=labels)
        extra.add(int(np.bincount(labels[first]).argmax()))
    assert extra == {0, 1, 2}  # the odd one falls on any class


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    test=st.floats(0.1, 0.9),
    validation=st.floats(0, 0.5),
    seed=st.integers(0, 99),
)
def test_f6_shares_of_every_class_are_right_up_to_rounding(counts, test, validation, seed):
    labels = labels_with(counts, seed)
    rows = np.arange(len(labels))
    try:
        plain = split_parts(rows, test=test, validation=validation, seed=seed, client=0)
    except DataError:
        return
    parts = split_parts(rows, test=test, validation=validation, seed=seed, client=0, labels=labels)
    assert [len(p) for p in parts] == [len(p) for p in plain]
    assert sorted(np.concatenate(parts)) == rows.tolist()
    tested = np.bincount(labels[parts[2]], minlength=len(counts))
    assert (np.abs(tested - np.array(counts) * len(parts[2]) / len(rows)) < 1).all()


def test_f6_elsewhere_training_takes_the_floor_of_three_quarters():
    fed = load_federation("digits", partition="shards", clients=10)
    assert fed.sizes("test").tolist() == [178 - 178 * 3 // 4] * 10
    assert load_federation("digits", partition="iid", stratify=True).partition["stratified"] is True


def test_similarity_study_has_eight_clients_unless_told_otherwise():
    assert load_federation("digits", partition="pfedla_similarity").n_clients == 8
    assert load_federation("digits", partition="pfedla_similarity", clients=5).n_clients == 5


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
