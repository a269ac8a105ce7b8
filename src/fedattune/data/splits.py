"""Splitting a client's samples into a training, a validation and a test part."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..core.errors import ConfigError, DataError
from .types import Array, Index

SplitKind = Literal["random", "time"]
"""Rule that gives a sample its part: by chance, or by its age."""


def split_parts(
    indices: Index,
    *,
    test: float = 0.25,
    validation: float = 0.1,
    seed: int,
    client: int,
    labels: Array | None = None,
    split_number: int = 0,
    times: Array | None = None,
) -> tuple[Index, Index, Index]:
    """Shuffle a client's indices, or sort them by time, and cut them into a training, a validation and a test part.

    Of n samples, m = floor((1 - test) n) are for training; the last floor(validation m) of these become the
    validation part. A client too small for a validation sample has one by chance; see `compute_part_sizes`.

    Args:
        indices: samples of the client, (n,).
        test: fraction for testing.
        validation: fraction of the training samples for validation.
        seed: seed of the partition.
        client: number of the client, which gives each client its own random stream.
        labels: class numbers of these samples, (n,). With them, each part has its share of every class, up to rounding.
        split_number: number of the split; each gives the client other parts.
        times: age of these samples, (n,): the oldest are for training and the newest for testing. Samples of one time
            keep their order, and may come into two parts.

    Returns:
        Indices of the three parts.

    Raises:
        DataError: the training or the test part would be empty.

    """
    random = np.random.default_rng([seed, client, split_number] if split_number else [seed, client])
    n_train, n_validation, n_test = compute_part_sizes(
        len(indices), test, validation, stream=[seed, client, split_number]
    )
    if not n_train or not n_test:
        raise DataError(
            f"client {client} has {len(indices)} samples, too few for a training and a test part; "
            'leave such clients out with --small-clients drop (small_clients="drop")'
        )
    n_used = n_train + n_validation
    if labels is None or times is not None:
        order = random.permutation(indices) if times is None else indices[np.argsort(times, kind="stable")]
        return order[:n_train], order[n_train:n_used], order[n_used:]
    _, strata = np.unique(labels, return_inverse=True)
    inside, outside = _draw_stratified(strata, n_used, random)
    train, held_out = _draw_stratified(strata[inside], n_train, random)
    return indices[inside[train]], indices[inside[held_out]], indices[outside]


def _draw_stratified(strata: Array, n: int, random: np.random.Generator) -> tuple[Index, Index]:
    """Draw n of the samples, the same share of every stratum; return positions of these and of the other samples.

    Where shares are no whole numbers, the strata with the largest remainders get one more, at random among equals.
    """
    totals = np.bincount(strata)
    shares = totals * n / max(len(strata), 1)
    quotas = np.floor(shares + 1e-9).astype(np.int64)  # n_c n / m may fall just below a whole number
    lacking = n - int(quotas.sum())
    remainders = np.round(shares - quotas, 9)
    quotas[np.lexsort((random.random(len(totals)), -remainders))[:lacking]] += 1
    mixed = [random.permutation(rows) for rows in group_rows(strata)]
    selected_rows = np.concatenate([rows[:k] for rows, k in zip(mixed, quotas, strict=True)])
    other_rows = np.concatenate([rows[k:] for rows, k in zip(mixed, quotas, strict=True)])
    return random.permutation(selected_rows), random.permutation(other_rows)


def group_rows(values: Array, n_values: int = 0) -> list[Index]:
    """Return the indices of each value 0, 1, ... of an int64 array, in their order."""
    order = np.argsort(values, kind="stable")
    ends = np.bincount(values, minlength=n_values).cumsum()
    return np.split(order, ends[:-1])


MIN_TRAIN_BESIDE = 2
"""Training samples that a client keeps at least where chance gives it a validation sample."""

VALIDATION_STREAM = 11
"""Number of the random stream that gives small clients a validation sample, apart from the streams of splits."""


def compute_part_sizes(
    n: int, test: float, validation: float, *, stream: Sequence[int]
) -> tuple[int, int, int]:
    """Return how many samples are for training, validation and testing.

    A client whose share of validation samples is below one gets one sample with that probability. So the clients with
    validation samples are a random sample of all clients, not the large ones alone; see `validation_weights`.

    Args:
        n: number of samples.
        test: fraction for testing.
        validation: fraction of the training samples for validation.
        stream: seed, client and split, from which chance is drawn.

    """
    n_used = int((1 - test) * n + 1e-9)  # floor; without the addend 0.7 * 10 could become 6
    n_validation = int(validation * n_used + 1e-9)
    if not n_validation and n_used > MIN_TRAIN_BESIDE:
        chance = np.random.default_rng([*stream, VALIDATION_STREAM]).random()
        n_validation = int(chance < validation * n_used)
    return n_used - n_validation, n_validation, n - n_used


def check_fractions(test: float, validation: float, seed: int) -> None:
    """Refuse impossible fractions for testing and validation, and impossible seeds.

    Raises:
        ConfigError: a fraction or the seed is out of its range.

    """
    if not 0 < test < 1:
        raise ConfigError(f"test must be a fraction above 0 and below 1, got {test}")
    if not 0 <= validation < 1:
        raise ConfigError(f"validation must be a fraction of at least 0 and below 1, got {validation}")
    if seed < 0:
        raise ConfigError(f"the partition's seed must be 0 or more, got {seed}")


def validation_weights(n_train: Array, n_validation: Array, validation: float) -> Array:
    """Return the inverse probability (N,) with which each client has validation rows; 0 for clients without any.

    With these weights, a mean over the clients that have validation rows is an unbiased mean over all clients
    (Horvitz and Thompson, 1952).

    Args:
        n_train: training samples of each client.
        n_validation: validation samples of each client.
        validation: fraction of the training samples for validation.

    """
    n_used = n_train + n_validation
    chance = np.clip(validation * n_used, 1e-9, 1.0)
    return np.where(n_validation > 0, 1 / chance, 0.0)
