"""Datasets of PyTorch as clients: every kind of item, read once, and clear words for what cannot be read."""

import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedattune import DataError, federation_from
from fedattune.data import items


class Items(TorchDataset[Any]):
    """A map-style Dataset that counts how often each item is read."""

    def __init__(self, *pairs: Any) -> None:
        self.pairs, self.read = pairs, [0] * len(pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Any:
        self.read[i] += 1
        return self.pairs[i]


class Sized(IterableDataset[Any]):
    """A stream that knows its length, as many do."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)] * 8)


def test_subsets_and_concatenations_hold_their_own_items() -> None:
    whole = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12) % 3)
    subset, both = Subset(whole, [5, 0, 7, 2]), ConcatDataset([Subset(whole, [1, 3]), Subset(whole, [4, 6, 8])])
    data = federation_from({"one": subset, "two": both}, test=0.3, validation=0)
    assert data.x.tolist() == [[2.0 * i, 2.0 * i + 1] for i in (5, 0, 7, 2, 1, 3, 4, 6, 8)]
    assert data.y.tolist() == [2, 0, 1, 2, 1, 0, 1, 0, 2]
    assert [len(client.all) for client in data.clients] == [4, 5]


def test_a_module_of_the_user_may_be_called_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("datasets")
    own.Dataset = Items  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", own)
    clients = [Items(*((torch.ones(2) * i, i % 2) for i in range(8)))] * 2
    assert federation_from(clients).x.shape == (16, 2)


def test_each_item_is_read_once() -> None:
    clients = [Items(*((np.float32([i, 1]), i % 2) for i in range(8))) for _ in range(2)]
    federation_from(clients)
    assert [client.read for client in clients] == [[1] * 8] * 2


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.tensor([1.5, 2.0]), [1.5, 2.0]),
        (np.array([1, 2], dtype=np.int16), [1.0, 2.0]),
        ([1, 2.5], [1.0, 2.5]),
        (3, [3.0]),
        (np.float64(0.5), [0.5]),
        (torch.tensor(True), [1.0]),
    ],
)
def test_samples_are_tensors_arrays_lists_or_numbers(x: Any, expected: list[float]) -> None:
    data = federation_from([Items(*((x, label) for label in ["a", "b"] * 4))] * 2)
    assert data.x.tolist() == [expected] * 16
    assert data.classes == ("a", "b")


def test_whole_numbers_before_fractions_are_not_cut() -> None:
    data = federation_from([Items(*((np.array([i] if i < 4 else [i + 0.5]), i % 2) for i in range(8)))] * 2)
    assert data.x[:8, 0].tolist() == [0, 1, 2, 3, 4.5, 5.5, 6.5, 7.5]


def test_pictures_become_what_to_tensor_makes_of_them() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 5, 3), dtype=np.uint8)
    coloured = Items(*((Image.fromarray(p), i % 2) for i, p in enumerate(pixels)))
    data = federation_from([coloured, coloured])
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x[:8], torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    grey = Items(*((Image.fromarray(p[..., 0]), i % 2) for i, p in enumerate(pixels)))
    assert torch.equal(federation_from([grey, grey]).x[:8], torch.from_numpy(pixels[..., 0])[:, None].float() / 255)


def test_a_terminal_shows_progress_and_a_file_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(items, "SHOWN_ITEMS", 8)
    client = Items(*((torch.ones(2) * i, i % 2) for i in range(8)))
    federation_from([client, client])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    federation_from([client, client])
    assert "reading client '0'" in capsys.readouterr().err


def test_an_empty_part_and_tensors_that_numpy_lacks_are_read() -> None:
    x = torch.arange(16.0).reshape(8, 2)
    full = Items(*((row.bfloat16(), i % 2) for i, row in enumerate(x)))
    parts = {"train": full, "validation": Items(), "test": (x.to_sparse(), torch.arange(8) % 2)}
    data = federation_from([parts, parts])
    assert data.sizes("validation").tolist() == [0, 0]
    assert torch.equal(data.x, torch.cat([x] * 4))


def test_one_dataset_for_all_clients_is_refused() -> None:
    with pytest.raises(DataError, match="got one torch Dataset, expected one per client in a list"):
        federation_from(Items(*[GOOD] * 8))


GOOD = (torch.zeros(2), 0)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (Items(GOOD, (torch.zeros(3), 0)), "item 0 has (2,), item 1 (3,); make images of one size and colour"),
        (Items(GOOD, (torch.zeros(2), None)), "item 1 has no target (None); give every item one"),
        (Items(GOOD, {"x": 1}), "every item of the Dataset must be a pair (x, y), and item 1 is dict"),
        (Items((1, 2, 3)), "a pair (x, y), and item 0 is 3 values"),
        (Items(GOOD, ("text", 0)), "item 1 has an x of the type str, expected a tensor, an array, a PIL image"),
        (Items(GOOD, ({"a": 1}, 0)), "item 1 has an x of the type dict"),
        (Items(([[1, 2], [3]], 0)), "item 0 has an x whose rows differ in length; pad or cut"),
        (Items(GOOD, (torch.zeros(2), [1, 2])), "targets must all have one shape, and item 0 has (), item 1 (2,)"),
        (Items((Image.new("I;16", (2, 2)), 0)), "item 0 has more than 8 bits per channel (mode I;16)"),
        (Sized(), "an iterable Dataset has no indices"),
        (DataLoader(Items(GOOD)), "got a DataLoader, expected its Dataset; give loader.dataset"),
    ],
)
def test_what_cannot_be_read_is_named(client: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"client 'ward'.*{re.escape(message)}"):
        federation_from({"ward": client, "other": Items(*[GOOD] * 8)})
