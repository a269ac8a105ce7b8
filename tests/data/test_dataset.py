"""Data sets refuse samples and labels that do not fit."""

import numpy as np
import pytest

from fedattune import DataError
from fedattune.data import Dataset


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(3, dtype=np.int64)}, "4 samples but 3 labels"),
        ({"y": np.zeros(4)}, "int64"),
        ({"y": np.array([0, 1, 2, 0])}, "row 2 has label 2"),
        ({"x": np.zeros((4, 2))}, "uint8, int64 or float32"),
        ({"x": np.zeros(4, dtype=np.float32)}, "shape"),
        ({"x": np.array([[1], [np.inf], [-np.inf], [0]], dtype=np.float32)}, "row 1 holds NaN"),
        ({"scale": np.ones((3,), dtype=np.float32)}, "scale of shape"),
        ({"shift": np.ones((1, 2, 2), dtype=np.float32)}, "shift of shape"),
        ({"owner": np.array([0, 0, 1, 2]), "owners": ("a", "b")}, "owners"),
        ({"owner": np.array([0]), "owners": ("a",)}, "1 owners"),
        ({"x": np.zeros((0, 2), dtype=np.float32), "y": np.zeros(0, dtype=np.int64)}, "no samples"),
    ],
)
def test_dataset_refuses(change, message):
    good = {"x": np.zeros((4, 2), dtype=np.float32), "y": np.array([0, 1, 0, 1]), "classes": ("a", "b")}
    Dataset("good", **good)
    with pytest.raises(DataError, match=message):
        Dataset("bad", **(good | change))
