"""Federations: samples, parts, features and heterogeneity."""

import numpy as np
import pytest
import torch

from data.small_sets import images, owned
from fedattune import ConfigError, DataError, Federation
from fedattune.data import Dataset, partition_dataset
from fedattune.data.client_index import Client
from fedattune.data.federated import choose_metric


def test_federation_properties():
    data = images(shift=np.full((1, 1, 1), 10, np.float32), scale=np.full((1, 1, 1), 0.5, np.float32))
    fed = partition_dataset(data, partition="iid", clients=4)
    assert (fed.n_clients, fed.n_classes, fed.input_shape) == (4, 4, (1, 2, 2))
    assert fed.names == ("0", "1", "2", "3")
    assert fed.device.type == "cpu"
    assert fed.sizes("train").tolist() == [34] * 4
    assert fed.sizes("validation").tolist() == [3] * 4
    assert fed.sizes("test").tolist() == [13] * 4
    assert fed.label_counts().sum() == 200
    assert fed.label_counts("test").sum(axis=1).tolist() == [13] * 4
    index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    x = fed.features(index, torch.float64)
    assert x.shape == (2, 3, 1, 2, 2)
    assert torch.equal(x, (fed.x[index].double() - 10) * 0.5)
    assert fed.x.dtype == torch.uint8
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        fed.part("trian")


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([("a", [0], [1]), ("a", [2], [3])], "names repeat: a"),
        ([("a", [0], [9])], "'a' has indices outside"),
        ([("a", [0], [0])], "'a' holds a sample twice"),
    ],
)
def test_federation_refuses(clients, message):
    def rows(values):
        return np.array(values, dtype=np.int64)

    made = tuple(Client(name, rows(train), rows([]), rows(test)) for name, train, test in clients)
    with pytest.raises(DataError, match=message):
        Federation("bad", torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), ("a",), made)


def test_heterogeneity_of_equal_and_of_disjoint_clients():
    same = partition_dataset(owned([40, 40])).heterogeneity()
    assert (same["label_distance"], same["label_distance_pairs"]) == (0, 0)
    assert (same["clients"], same["samples_min"], same["samples_median"], same["classes_max"]) == (2, 40, 40, 2)
    rows = [np.arange(i, i + 10) for i in (0, 10)]
    none = np.zeros(0, dtype=np.int64)
    apart = Federation(
        "apart",
        torch.zeros(20, 1),
        torch.arange(20) // 10,
        ("a", "b"),
        tuple(Client(str(i), r, none, none) for i, r in enumerate(rows)),
    ).heterogeneity()
    assert apart["label_distance"] == pytest.approx(0.5)
    assert apart["label_distance_pairs"] == pytest.approx(1.0)


def test_the_metric_follows_the_classes_of_the_test_parts():
    """COVID tests: most are negative, and a small clinic has no other; AUC says what the few large ones tell apart."""

    def choose(n_mixed: int, n_single: int, share: float) -> str:
        rare = np.random.default_rng(0).random(40 * n_mixed) < share
        y = [*np.where(rare, np.arange(len(rare)) % 2, 2), *[2] * (40 * n_single)]
        owner = np.repeat(np.arange(n_mixed + n_single), 40)
        names = tuple(f"c{i}" for i in range(n_mixed + n_single))
        x = np.zeros((len(y), 1), dtype=np.float32)
        data = Dataset("clinics", x, np.array(y), ("invalid", "positive", "negative"), owner=owner, owners=names)
        return choose_metric(partition_dataset(data))

    assert choose(8, 12, 0.3) == "auc"
    assert choose(4, 12, 0.3) == "balanced_accuracy"
    assert choose(4, 2, 0.2) == "auc"
    assert choose(8, 0, 0.6) == "accuracy"
