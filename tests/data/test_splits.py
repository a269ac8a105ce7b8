"""Splitting a client into parts, oracle F6 among them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import CIFAR10, labels_with
from fedattune import DataError
from fedattune.data import Dataset, partition_dataset, restore_federation, split_parts


def test_split_sizes_and_determinism():
    rows = np.arange(100, 147)
    train, validation, test = split_parts(rows, seed=3, client=5)
    assert len(train) + len(validation) == int(0.75 * 47)
    assert len(validation) == int(0.1 * 35)
    assert sorted(np.concatenate([train, validation, test])) == rows.tolist()
    assert np.array_equal(split_parts(rows, seed=3, client=5)[0], train)
    assert not np.array_equal(split_parts(rows, seed=3, client=6)[0], train)
    assert len(split_parts(np.arange(10), test=0.3, validation=0.0, seed=0, client=0)[0]) == 7
    with pytest.raises(DataError, match="client 0 has 1 samples"):
        split_parts(np.arange(1), seed=0, client=0)


def test_f6_every_class_of_pfedla_is_divided_alike():
    data = Dataset("toy", np.zeros((60_000, 1), dtype=np.uint8), CIFAR10, tuple("abcdefghij"))
    fed = partition_dataset(data, partition="pfedla", clients=10, test=0.3, validation=0.2)
    held = fed.label_counts() > 0
    for part, each in (("train", 84), ("validation", 21), ("test", 45)):  # of 150: 0.7 x 0.8, 0.7 x 0.2, 0.3
        assert set(fed.label_counts(part)[held]) == {each}
    assert fed.partition["stratified"] is True
    assert restore_federation(data, fed.manifest()).manifest() == fed.manifest()
    loose = partition_dataset(data, partition="pfedla", clients=10, test=0.3, validation=0.2, stratify=False)
    assert len(set(loose.label_counts("test")[held])) > 1
    assert "stratified" not in loose.partition
    assert loose.sizes("test").tolist() == fed.sizes("test").tolist() == [180] * 10


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
