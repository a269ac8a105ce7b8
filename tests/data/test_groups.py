"""Groups of rows, such as the visits of a patient: each group is in one part as a whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.small_sets import owned
from fedattune import ConfigError, DataError
from fedattune.data import Dataset, partition_dataset, restore_federation, split_parts
from fedattune.data.dataset import Times

VISITS = 5


def patients(n_clients=2, n=40, **more):
    """Make clients with n patients each, of five visits and one class."""
    data = owned([n * VISITS] * n_clients)
    groups = np.random.default_rng(0).permutation(n_clients * n).repeat(VISITS)
    return replace(data, y=(groups % 4 == 0).astype(np.int64), groups=groups, **more)


def find_divided(fed, groups):
    """Return the groups that a client has in several parts."""
    divided = set()
    for client in fed.clients:
        parts = [set(groups[rows].tolist()) for rows in (client.train, client.validation, client.test)]
        divided |= (parts[0] & parts[1]) | (parts[0] & parts[2]) | (parts[1] & parts[2])
    return divided


@pytest.mark.parametrize("stratify", [None, True])
@pytest.mark.parametrize("split_number", [0, 3])
def test_a_patient_is_in_one_part(stratify, split_number):
    data = patients()
    fed = partition_dataset(data, stratify=stratify, split_number=split_number)
    assert not find_divided(fed, data.groups)
    for client in fed.clients:
        assert len(client.all) == 200
        assert [len(client.train), len(client.validation), len(client.test)] == [135, 15, 50]
        if stratify:
            assert data.y[client.test].mean() == pytest.approx(data.y[client.all].mean(), abs=0.06)
    assert fed.partition["grouped"] is True
    assert restore_federation(data, fed.manifest()).manifest() == fed.manifest()
    assert find_divided(partition_dataset(replace(data, groups=None)), data.groups)


def test_splits_and_seeds_differ_and_come_back():
    data = patients()
    digests = [partition_dataset(data, split_number=k, seed=seed).digest for k in (0, 1) for seed in (0, 1)]
    assert len({*digests, partition_dataset(replace(data, groups=None)).digest}) == 5
    assert partition_dataset(data).digest == digests[0]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    test=st.floats(0.1, 0.9),
    validation=st.floats(0, 0.5),
    seed=st.integers(0, 99),
    n_classes=st.integers(0, 3),
)
def test_parts_are_whole_groups_and_as_large_as_groups_allow(sizes, test, validation, seed, n_classes):
    groups = np.random.default_rng(seed).permutation(np.arange(len(sizes)).repeat(sizes))
    labels = np.random.default_rng(seed).integers(0, n_classes, len(groups)) if n_classes else None
    rows = np.arange(len(groups)) + 7
    parts = split_parts(rows, test=test, validation=validation, seed=seed, client=0, groups=groups, labels=labels)
    assert sorted(np.concatenate(parts)) == rows.tolist()
    held = [set(groups[part - 7].tolist()) for part in parts]
    assert sum(map(len, held)) == len(sizes)
    if len(sizes) > 1:
        assert held[0]
        assert held[2]
    if labels is None and len(sizes) > 1:  # moving the smallest group would bring the size no nearer by more than it
        wanted = len(rows) - int((1 - test) * len(rows) + 1e-9)
        assert abs(len(parts[2]) - wanted) <= max(sizes)


def test_two_groups_of_unlike_size_give_both_parts():
    groups = np.array([0] * 90 + [1] * 10)
    for seed in range(20):
        train, held_out, test = split_parts(np.arange(100), seed=seed, client=0, groups=groups)
        assert (len(train), len(held_out), len(test)) == (90, 0, 10)


def test_a_client_of_one_group_is_too_small_and_named():
    data = patients(3)
    groups = np.where(data.owner == 1, -1, data.groups)
    fed = partition_dataset(replace(data, groups=groups))
    assert fed.names == ("A", "C")
    assert "1 of 3 clients are left out: client 'B' has 200 samples of one group, which is not divided." in fed.notes
    with pytest.raises(DataError, match="client 'B' has 200 samples of one group"):
        partition_dataset(replace(data, groups=groups), small_clients="error")


def test_groups_at_several_clients_are_noted():
    data = patients()
    assert not any("at several clients" in note for note in partition_dataset(data).notes)
    shared = np.where(data.groups < 6, 0, data.groups)
    fed = partition_dataset(replace(data, groups=shared))
    assert any(note.startswith("1 of 75 groups have rows at several clients") for note in fed.notes)


def test_groups_and_time_do_not_go_together():
    n = len(patients().y)
    data = patients(read_times=lambda _: Times("seen", np.arange(n, dtype=np.float64), are_dates=True))
    with pytest.raises(ConfigError, match="--split time and --group-column do not go together"):
        partition_dataset(data, split="time")


def test_groups_are_whole_numbers_one_per_sample():
    x, y = np.zeros((4, 1), dtype=np.float32), np.array([0, 1, 0, 1])
    for wrong in (np.zeros(3, dtype=np.int64), np.zeros(4)):
        with pytest.raises(DataError, match=r"groups must be int64 of shape \(4,\), one per sample, got"):
            Dataset("own", x, y, ("a", "b"), groups=wrong)
