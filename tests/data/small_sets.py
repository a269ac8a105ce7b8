"""Small data sets for the tests of federations."""

import numpy as np

from fedattune.data import Dataset


def images(n=200, **more):
    """Make n images of four classes."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (n, 1, 2, 2), dtype=np.uint8)
    return Dataset("toy", x, np.arange(n) % 4, ("a", "b", "c", "d"), **more)


def owned(sizes, y=None):
    """Make a data set with natural clients A, B, ... of these sizes."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    n = len(owner)
    x = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
    labels = np.arange(n) % 2 if y is None else np.asarray(y)
    return Dataset("own", x, labels, ("no", "yes"), owner=owner, owners=tuple("ABCDEFGHIJ"[: len(sizes)]))
