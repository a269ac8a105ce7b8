"""Data that processes share by files."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fedattune.data.cache import find_mapped_file, save_mapped
from fedattune.experiments.pool import make_shared_folder, pack, unpack


def test_large_arrays_are_shared_and_small_ones_are_not(tmp_path: Path) -> None:
    x = torch.arange(40_000.0).reshape(100, 400)
    kept = torch.from_numpy(save_mapped(tmp_path / "kept.npy", np.arange(20_000.0)))
    thing = {"x": x, "kept": kept, "small": torch.ones(3), "view": x[50:], "text": ["a"]}
    expected = {key: value.clone() for key, value in thing.items() if isinstance(value, torch.Tensor)}
    with make_shared_folder(tmp_path / "scratch") as folder:
        packed = pack(thing, folder)
        found = unpack(packed)
        assert len(packed) < 2000
        assert find_mapped_file(found["x"]) == find_mapped_file(x) == folder.resolve() / "0.npy"
        assert find_mapped_file(found["kept"]) == tmp_path.resolve() / "kept.npy"
        assert find_mapped_file(found["small"]) is None
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(packed)
    assert not folder.exists()
    for key, value in expected.items():
        assert torch.equal(found[key], value)
        assert torch.equal(thing[key], value)
    assert found["text"] == ["a"]
    assert find_mapped_file(x) is None  # it is still mapped, but nobody else can be told where from


def test_remains_of_a_crash_go(tmp_path: Path) -> None:
    (tmp_path / ".shared-old").mkdir()
    (tmp_path / ".shared-old" / "0.npy").write_text("")
    with make_shared_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
