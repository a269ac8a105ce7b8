"""Splitting a client into parts, oracle F6 among them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.labels import CIFAR10, labels_with
from data.small_sets import owned
from fedattune import ConfigError, DataError
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
    assert [len(part) for part in split_parts(np.arange(1), seed=0, client=0)] == [0, 0, 1]


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
    plain = split_parts(rows, test=test, validation=validation, seed=seed, client=0)
    parts = split_parts(rows, test=test, validation=validation, seed=seed, client=0, labels=labels)
    assert [len(p) for p in parts] == [len(p) for p in plain]
    assert sorted(np.concatenate(parts)) == rows.tolist()
    tested = np.bincount(labels[parts[2]], minlength=len(counts))
    assert (np.abs(tested - np.array(counts) * len(parts[2]) / len(rows)) < 1).all()


def test_clients_with_fewer_rows_than_asked_for_are_left_out_and_named():
    data = owned([300, 12, 40, 3])
    with_all = partition_dataset(data)
    assert any("3 to 300 rows, 2 of them fewer than 20; --min-rows 20 leaves" in note for note in with_all.notes)
    fed = partition_dataset(data, min_rows=20)
    assert fed.names == ("A", "C")
    assert "2 of 4 clients have fewer than 20 rows and are left out: 'B' (12), 'D' (3)." in fed.notes
    assert not any("--min-rows" in note for note in fed.notes)
    assert fed.partition["min_rows"] == 20
    # The others keep their parts.
    assert np.array_equal(fed.clients[1].test, with_all.clients[2].test)
    assert partition_dataset(data, min_rows=1).names == tuple("ABCD")
    assert partition_dataset(data, partition="iid", clients=5, min_rows=71).n_clients == 5
    with pytest.raises(DataError, match=r"only 'A' after 3 too small.* were left out"):
        partition_dataset(data, min_rows=41)
    with pytest.raises(DataError, match=r"no client is left: 4 of 4 clients.* or a smaller --min-rows"):
        partition_dataset(data, min_rows=301)
    with pytest.raises(ConfigError, match="min_rows must be at least 1, got 0"):
        partition_dataset(data, min_rows=0)


def test_clients_of_like_size_are_not_told_of_min_rows():
    for sizes in ([15, 12, 18], [300, 40], [300, 12]):  # all small, none small, one would be left alone
        assert not any("--min-rows" in note for note in partition_dataset(owned(sizes)).notes)
