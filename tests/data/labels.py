"""Labels for the tests of partitions."""

import numpy as np


def labels_with(counts, seed=0):
    """Labels in random order, `counts` of each class."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def count_labels(labels, parts):
    """Count the labels of each client, (N, classes); the parts must not share a sample."""
    joint = np.concatenate(parts)
    assert len(np.unique(joint)) == len(joint)
    return np.stack([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


def covers(parts, n):
    """Return whether the parts hold each of n samples once."""
    joint = np.concatenate(parts)
    return len(joint) == n and len(np.unique(joint)) == n


CIFAR10, CIFAR100 = labels_with([6000] * 10), labels_with([600] * 100)
CIFAR10_TRAIN = labels_with([5000] * 10)
