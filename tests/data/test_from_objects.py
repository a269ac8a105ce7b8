"""The Python entry: clients as arrays, tensors, Datasets or mappings."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import fedattune
from fedattune import ConfigError, DataError, federation_from


def pair(n=20, seed=0, n_classes=2):
    x = np.random.default_rng(seed).normal(size=(n, 3))
    return x, np.arange(n) % n_classes


class Items(TorchDataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_all_forms_give_the_same_federation():
    x, y = pair()
    tensors = torch.tensor(x), torch.tensor(y)
    forms = [
        (x, y),
        tensors,
        TensorDataset(*tensors),
        Items([(x[i], int(y[i])) for i in range(20)]),
        Items([tuple(t[i] for t in tensors) for i in range(20)]),
    ]
    made = [federation_from([form, pair(12, 1)], names=["a", "b"], seed=4) for form in forms]
    assert {fed.manifest()["hash"] for fed in made} == {made[0].manifest()["hash"]}
    fed = made[0]
    assert fed.x.dtype == torch.float32
    assert fed.names == ("a", "b")
    assert fed.classes == ("0", "1")
    assert fed.sizes("test").tolist() == [5, 3]
    assert fed.manifest()["data"]["n"] == 32


def test_own_split_is_kept():
    x, y = pair(30)
    own = {"train": (x[:20], y[:20]), "test": (x[20:], y[20:])}
    fed = federation_from([own, own | {"validation": (x[:4], y[:4])}])
    assert fed.sizes("train").tolist() == [18, 20]
    assert fed.sizes("validation").tolist() == [2, 4]
    assert fed.sizes("test").tolist() == [10, 10]
    rows = torch.tensor(fed.clients[0].test)
    assert torch.equal(fed.features(rows), torch.tensor(x[20:], dtype=torch.float32))


def test_text_labels_and_given_classes():
    x, _ = pair(8)
    text = federation_from([(x, ["no", "yes"] * 4)] * 2)
    assert text.classes == ("no", "yes")
    assert text.y.tolist() == [0, 1] * 8
    assert federation_from([(x, ["no", "yes"] * 4)] * 2, classes=["yes", "no"]).y.tolist() == [1, 0] * 8
    assert federation_from([(x, [True, False] * 4)] * 2, classes=["a", "b", "c"]).n_classes == 3
    with pytest.raises(DataError, match="did you mean 'yes'"):
        federation_from([(x, ["no", "yse"] * 4)], classes=["no", "yes"])


def test_bytes_stay_bytes_and_are_noted():
    x = np.full((8, 1, 2, 2), 200, dtype=np.uint8)
    fed = federation_from([(x, np.arange(8) % 2)] * 2)
    assert fed.x.dtype == torch.uint8
    assert "0 to 200" in fed.notes[0]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([(np.zeros((0, 3)), np.zeros(0))], "no client has any samples"),
        ([pair(), (np.zeros((4, 2)), [0, 1, 0, 1])], "client '1' has samples of shape"),
        ([(np.zeros((4, 2)), [0, 1, 0])], "client '0': expected x of shape"),
        ([(np.full((4, 2), np.nan), [0, 1, 0, 1])], "client '0': sample 0 holds NaN"),
        ([(np.full((4, 2), 1e300), [0, 1, 0, 1])], "not finite in float32"),
        ([(np.full((4, 2), "a"), [0, 1, 0, 1])], "x must hold numbers"),
        ([(np.zeros((4, 2)), np.zeros(4, dtype=complex))], "y must hold"),
        ([(np.zeros((4, 2)), [0, -1, 0, 1])], "client '0': labels must be whole.*target_type='number'"),
        ([(np.zeros((4, 2)), [0, np.nan, 0, 1])], "client '0': the target of sample 1 is nan"),
        ([(np.zeros((4, 2)), np.array(["a", "b", None, "a"]))], "client '0': sample 2 has no label"),
        ([(np.zeros((4, 2)), np.array(["a", math.nan, "b", "a"], dtype=object))], "client '0': sample 1 has no label"),
        ([(np.zeros((4, 2)), [2.5] * 4)], "all targets are 2.5; there is nothing to predict"),
        ([5], "client '0': expected a pair"),
        ([Items([1, 2])], "must be a pair"),
        ([Items([(np.zeros(2), 0), (np.zeros(3), 0)])], "one shape"),
        ([Stream()], "iterable"),
        ([{"train": pair()}], "has no 'test' part"),
        ([{"train": pair(), "tets": pair()}], "did you mean 'test'"),
        ([{"train": pair(), "test": (np.zeros((0, 3)), [])}], "20 samples, 18 to train and 0 to test"),
        ([pair(1)], "client '0' has 1 sample"),
        ([pair()], "own data: a federation needs at least two clients, but there is only '0'; divide"),
    ],
)
def test_refuses(clients, message):
    with pytest.raises(DataError, match=message):
        federation_from(clients)


def test_refuses_names_classes_and_fractions():
    with pytest.raises(DataError, match="1 clients but 2 names"):
        federation_from([pair()], names=["a", "b"])
    with pytest.raises(DataError, match="client '0' has label 1, but there are 1 classes"):
        federation_from([pair()], classes=["a"])
    with pytest.raises(ConfigError, match="test must"):
        federation_from([pair()], test=1.0)


def measured(n_clients=3):
    """Make clients whose target is a number: 50 plus 15 times the first feature."""
    random = np.random.default_rng(0)
    xs = [random.normal(size=(80, 5)).astype(np.float32) for _ in range(n_clients)]
    return {f"c{i}": (x, 50 + 15 * x[:, 0]) for i, x in enumerate(xs)}


def test_fractions_are_numbers_to_predict_in_their_unit():
    clients = measured()
    fed = federation_from(clients)
    assert (fed.classes, fed.n_outputs) == ((), 1)
    assert any(note.startswith("The target is a number") for note in fed.notes)
    assert not any("target_type" in note for note in fed.notes)
    train = np.concatenate([client.train for client in fed.clients])
    truth = np.concatenate([y for _, y in clients.values()])
    assert fed.target_scale is not None
    assert fed.target_scale == pytest.approx((truth[train].mean(), truth[train].std()))
    np.testing.assert_allclose(fed.y * fed.target_scale.deviation + fed.target_scale.mean, truth, rtol=1e-5)
    result = fedattune.fit(fed, "fedavg", "mlr", rounds=30, lr=0.1)
    assert result.measure_clients("rmse").max() < 3  # of a deviation of 15
    columns = federation_from({name: (x, torch.tensor(y)[:, None]) for name, (x, y) in clients.items()})
    assert columns.digest == fed.digest


def test_whole_floats_are_numbers_and_a_note_says_so():
    ages = {name: (x, y.round()) for name, (x, y) in measured().items()}
    fed = federation_from(ages)
    assert not fed.classes
    assert any("taken as numbers to predict; for classes, give target_type='class'" in note for note in fed.notes)
    assert federation_from(ages, target_type="number").notes == fed.notes[1:]
    few = {"a": (np.zeros((8, 2)), np.arange(8) % 2 * 1.0), "b": (np.zeros((8, 2)), np.arange(8) % 2 * 1.0)}
    assert not federation_from(few).classes
    assert federation_from(few, target_type="class").classes == ("0", "1")
    assert federation_from(few, classes=["no", "yes"]).classes == ("no", "yes")


def test_whole_numbers_are_classes_if_few_or_if_they_count_classes():
    x = np.zeros((300, 2))
    two = [(x, np.arange(300) % 20)] * 2
    assert federation_from(two).n_classes == 20
    assert not any("whole numbers" in note for note in federation_from(two).notes)
    hundred = federation_from([(x, np.arange(300) % 100)] * 2)
    assert hundred.n_classes == 100
    assert any("100 different whole numbers (0 to 99) and taken as classes" in note for note in hundred.notes)
    ages = federation_from([(x, 18 + np.arange(300) % 73)] * 2)
    assert not ages.classes
    assert any("73 different whole numbers (18 to 90) and taken as numbers" in note for note in ages.notes)
    assert not federation_from(two, target_type="number").classes


def test_refuses_kinds_of_targets_that_do_not_fit():
    x = np.zeros((8, 2))
    with pytest.raises(DataError, match="the targets are text; give numbers"):
        federation_from([(x, ["no", "yes"] * 4)] * 2, target_type="number")
    with pytest.raises(DataError, match="labels must be whole numbers from 0"):
        federation_from([(x, np.arange(8) / 2)] * 2, target_type="class")
    with pytest.raises(ConfigError, match="do not go together"):
        federation_from([pair()] * 2, classes=["a", "b"], target_type="number")
    with pytest.raises(ConfigError, match="unknown target_type 'numbers'; did you mean 'number'"):
        federation_from([pair()] * 2, target_type="numbers")
