"""Two classes per client: the exact sizes of the papers' protocols."""

import numpy as np
import pytest

from data.labels import covers, labels_with
from fedattune import DataError
from fedattune.data.partitions import two_class

MNIST_COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
TOTALS = {
    "mnist": "5112 4988 3890 4254 3216 3073 3272 3014 3882 4358 2942 1556 2203 1853 1782 3653 4315 4030 4180 4427",
    "fashion": "4957 4962 3409 4115 6162 2947 3251 4545 3666 3111 2841 1539 2345 2385 1579 3255 4248 3701 3834 3148",
    "cifar10": "5252 3376 5114 3975 4482 2298 3433 2015 2254 3606 1094 1689 1619 2205 1371 3356 3502 3252 3566 2541",
}
COUNTS = {"mnist": MNIST_COUNTS, "fashion": [7000] * 10, "cifar10": [6000] * 10}


@pytest.mark.parametrize("name", TOTALS)
def test_protocol_a_has_the_papers_sizes(name):
    labels = labels_with(COUNTS[name])
    parts = two_class(labels, 20, 1)
    assert [len(p) for p in parts] == [int(v) for v in TOTALS[name].split()]
    assert covers(parts, len(labels))


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
