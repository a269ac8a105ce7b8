"""pFedLA's partitions: the sizes of the paper's protocol, and clients of known similarity."""

import numpy as np
import pytest

from data.labels import CIFAR10, CIFAR100, count_labels, labels_with
from fedattune import DataError
from fedattune.data.partitions.pfedla import pfedla, pfedla_similarity


@pytest.mark.parametrize(
    ("labels", "n_clients", "classes", "each", "times"),
    [(CIFAR10, 100, 4, 150, 40), (CIFAR10, 10, 4, 150, 4), (CIFAR100, 100, 12, 50, 12)],
)
def test_pfedla_setting_1_has_few_classes_alike(labels, n_clients, classes, each, times):
    counts = count_labels(labels, pfedla(labels, n_clients, 0))
    assert set(counts[counts > 0]) == {each}
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert ((counts > 0).sum(axis=0) == times).all()  # 100 clients take all 60,000 images


@pytest.mark.parametrize(
    ("labels", "dominant", "each", "others"), [(CIFAR10, 2, 150, 300 // 8), (CIFAR100, 6, 50, 300 // 94)]
)
def test_pfedla_setting_2_has_all_classes_and_dominant_ones(labels, dominant, each, others):
    counts = count_labels(labels, pfedla(labels, 100, 0, setting=2))
    assert set(counts.reshape(-1)) == {each, others}
    assert ((counts == each).sum(axis=1) == dominant).all()
    often = (counts == each).sum(axis=0)
    assert often.max() - often.min() == 0
    shared = count_labels(CIFAR10, pfedla(CIFAR10, 10, 0, setting=2, classes=3, dominant_share=0.9, size=200))
    assert set(shared.reshape(-1)) == {180 // 3, 20 // 7}
    assert set((shared == 60).sum(axis=0)) == {3}


@pytest.mark.parametrize("classes", [1, 3, 6, 7, 10])
def test_pfedla_chooses_classes_as_evenly_as_can_be(classes):
    labels = labels_with([50] * 10)
    held = count_labels(labels, pfedla(labels, 7, 3, classes=classes)) > 0
    assert (held.sum(axis=1) == classes).all()
    assert held.sum(axis=0).max() - held.sum(axis=0).min() <= 1


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
    counts = count_labels(CIFAR10, pfedla_similarity(CIFAR10, 8, 0))
    for u in range(8):
        assert set(np.flatnonzero(counts[u])) == {u % 10, (u + 1) % 10, (u + 2) % 10, (u + 3) % 10}
    assert set(counts[counts > 0]) == {150}


@pytest.mark.parametrize("seed", range(5))
def test_weights_study_has_an_equal_a_similar_and_strange_clients(seed):
    held = count_labels(CIFAR10, pfedla_similarity(CIFAR10, 8, seed, study="weights")) > 0
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
