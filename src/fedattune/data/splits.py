"""Split clients' samples into training, validation and test parts, by chance or by age; select the usable clients."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..core.errors import ConfigError, DataError, list_some
from .client_index import Client
from .dataset import Dataset, Times
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
    groups: Array | None = None,
) -> tuple[Index, Index, Index]:
    """Shuffle a client's indices, or sort them by time, and cut them into a training, a validation and a test part.

    Of n samples, m = floor((1 - test) n) are for training; the last floor(validation m) of these become the
    validation part. A client too small for a validation sample has one by chance; see `compute_part_sizes`. A client
    too small for a split has an empty part.

    Args:
        client: number of the client, which gives each client its own random stream.
        labels: class numbers of these samples, (n,). With them, each part has its share of every class, up to rounding.
        split_number: number of the split; each gives the client other parts.
        times: age of these samples, (n,): the oldest are for training and the newest for testing. Samples of one time
            keep their order, and may come into two parts.
        groups: group of these samples, (n,): each group is in one part as a whole, and parts are as large as groups
            allow.

    Returns:
        Indices of the three parts.
    """
    random = np.random.default_rng([seed, client, split_number] if split_number else [seed, client])
    n_train, n_validation, _ = compute_part_sizes(len(indices), test, validation, [seed, client, split_number])
    n_used = n_train + n_validation
    if groups is not None and len(indices):
        strata = np.zeros(len(indices), dtype=np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
        inside, outside = draw_groups(groups, strata, n_used, random)
        if n_validation and len(np.unique(groups[inside])) > MIN_TRAIN_BESIDE:
            train, held_out = draw_groups(groups[inside], strata[inside], n_train, random)
        else:
            train, held_out = np.arange(len(inside)), np.arange(0)
        return indices[inside[train]], indices[inside[held_out]], indices[outside]
    if labels is None or times is not None or not n_used:
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
    mixed = [np.split(random.permutation(rows), [k]) for rows, k in zip(group_rows(strata), quotas, strict=True)]
    selected_rows, other_rows = (np.concatenate(pieces) for pieces in zip(*mixed, strict=True))
    return random.permutation(selected_rows), random.permutation(other_rows)


GROUP_ORDERS = 32
"""Random orders of groups of which the one is taken whose parts have the sizes most nearly."""


def draw_groups(groups: Array, strata: Array, n: int, random: np.random.Generator) -> tuple[Index, Index]:
    """Draw whole groups with about n of the samples, and the same share of every stratum.

    Returns positions of these and of the other samples; both hold a group, unless there is a single one.
    """
    codes = np.unique(groups, return_inverse=True)[1]
    counts = np.zeros((codes.max() + 1, strata.max() + 1), dtype=np.int64)  # samples by group and stratum
    np.add.at(counts, (codes, strata), 1)
    wanted = counts.sum(axis=0) * n / len(codes)
    orders = random.permuted(np.tile(np.arange(len(counts)), (GROUP_ORDERS, 1)), axis=1)
    lacking = np.tile(wanted, (GROUP_ORDERS, 1))
    takes = np.zeros(orders.shape, dtype=bool)  # (orders, groups)
    each, last = np.arange(GROUP_ORDERS), len(counts) - 1
    for step, group in enumerate(orders.T):  # a group is taken if that brings the sizes nearer
        without = lacking - counts[group]
        is_nearer = _measure_gap(without) < _measure_gap(lacking)
        if step == last > 0:  # both sides hold a group
            n_taken = takes.sum(axis=1)
            is_nearer = (n_taken == 0) | (is_nearer & (n_taken < last))
        takes[each, group] = is_nearer
        lacking = np.where(is_nearer[:, None], without, lacking)
    best = takes[_measure_gap(lacking).argmin()]
    is_taken = best[codes]
    return random.permutation(np.flatnonzero(is_taken)), random.permutation(np.flatnonzero(~is_taken))


def _measure_gap(lacking: Array) -> Array:
    """Return how far sizes are from the wanted ones (orders,), by stratum and in all, from samples that are lacking."""
    return np.asarray(np.abs(lacking).sum(axis=1) + np.abs(lacking.sum(axis=1)))


def group_rows(values: Array, n_values: int = 0) -> list[Index]:
    """Return the indices of each value 0, 1, ... of an int64 array, in their order."""
    order = np.argsort(values, kind="stable")
    ends = np.bincount(values, minlength=n_values).cumsum()
    return np.split(order, ends[:-1])


MIN_TRAIN_BESIDE = 2
"""Training samples that a client keeps at least where chance gives it a validation sample."""
VALIDATION_STREAM = 11
"""Number of the random stream that gives small clients a validation sample, apart from the streams of splits."""


def compute_part_sizes(n: int, test: float, validation: float, stream: Sequence[int]) -> tuple[int, int, int]:
    """Return how many samples are for training, validation and testing.

    A client whose share of validation samples is below one gets one sample with that probability. So the clients with
    validation samples are a random sample of all clients, not the large ones alone; see `validation_weights`.
    """
    n_used = int((1 - test) * n + 1e-9)  # floor; without the addend 0.7 * 10 could become 6
    n_validation = int(validation * n_used + 1e-9)
    if not n_validation and n_used > MIN_TRAIN_BESIDE:
        chance = np.random.default_rng([*stream, VALIDATION_STREAM]).random()
        n_validation = int(chance < validation * n_used)
    return n_used - n_validation, n_validation, n - n_used


def check_fractions(test: float, validation: float, seed: int) -> None:
    """Refuse impossible fractions for testing and validation, and impossible seeds."""
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
    """
    n_used = n_train + n_validation
    chance = np.clip(validation * n_used, 1e-9, 1.0)
    return np.where(n_validation > 0, 1 / chance, 0.0)


def read_times(
    dataset: Dataset, split: SplitKind, column: str | None, *, is_stratified: bool, split_number: int
) -> Times | None:
    """Return the age of all samples by a column (None for the only date column); None if chance decides their part."""
    if split not in ("random", "time"):
        raise ConfigError(f"split must be 'random' or 'time', got {split!r}")
    if split == "random":
        if column is not None:
            raise ConfigError(f"--time-column {column} goes only with --split time; add it")
        return None
    if dataset.read_times is None:
        raise ConfigError(f"--split time needs a table with a column of dates, and {dataset.name} is none")
    if dataset.groups is not None:
        raise ConfigError(
            "--split time and --group-column do not go together: the rows of a group may be older and newer than the "
            "cut; leave one of them out"
        )
    if is_stratified:
        raise ConfigError(
            "--split time and --stratify true do not go together: time alone decides the part of a row; "
            "give --stratify false"
        )
    if split_number:
        raise ConfigError(
            "--split time has one split, as a client's newest rows are always the same; leave --splits out, and "
            "repeat the training with --seeds"
        )
    return dataset.read_times(column)


def leave_out_timeless(rows: Sequence[Index], times: Times | None) -> tuple[list[Index], tuple[str, ...]]:
    """Leave out samples without a time, and say how many they are."""
    if times is None:
        return list(rows), ()
    timed = [mine[~np.isnan(times.values[mine])] for mine in rows]
    n_all, n_timed = (sum(map(len, each)) for each in (rows, timed))
    if n_timed == n_all:
        return timed, ()
    return timed, (f"{n_all - n_timed} of {n_all} rows have no value in column {times.column!r} and are left out.",)


def describe_cuts(dataset: Dataset, times: Times, members: Sequence[Client]) -> tuple[str, ...]:
    """Say by which column the parts follow each other, and when the clients' tests begin."""
    starts = np.array([times.values[client.test].min() for client in members])
    first, last = (times.show(float(value)) for value in (starts.min(), starts.max()))
    when = f"at {first}" if first == last else f"between {first} and {last}"
    notes = [
        f"Each client trains on its oldest rows by column {times.column!r} and is tested on its newest; the test "
        f"parts begin {when}."
    ]
    if dataset.schema is not None and times.column in dataset.schema.columns:
        notes.append(
            f"Column {times.column!r} is a feature, too, and its newest values occur in no training row; "
            f"--drop-columns {times.column} leaves it out of the features."
        )
    return tuple(notes)


SmallClients = Literal["auto", "error", "drop"]
"""Treatment of clients that are too small: name them in an error, or leave them out with a note.

`auto` leaves out clients of the data's own, which nobody chose so small, and names clients that a partition made.
"""

MAX_CLIENTS_IN_NOTE = 5
"""Clients that one message or note names."""


def select_usable_clients(
    dataset: Dataset,
    names: Sequence[str],
    rows: Sequence[Index],
    sizes: Sequence[tuple[int, int, int]],
    small_clients: SmallClients,
    min_clients: int,
    min_rows: int | None = None,
) -> tuple[list[int], tuple[str, ...]]:
    """Return the numbers of the clients that have samples to train and to test, and notes for the user.

    Clients with fewer than `min_rows` samples are left out, too.
    """
    if small_clients not in ("error", "drop"):
        raise ConfigError(f"small_clients must be 'error' or 'drop', got {small_clients!r}")
    name, y = dataset.name, dataset.y
    has_classes = dataset.kind == "class"
    single = [u for u, mine in enumerate(rows) if has_classes and len(mine) and y[mine].min() == y[mine].max()]
    small = {u: f"{names[u]!r} ({len(mine)})" for u, mine in enumerate(rows) if len(mine) < (min_rows or 0)}
    faults = {}
    for u, (n_train, _, n_test) in enumerate(sizes):
        if u not in small and (not n_train or not n_test):
            plural = "s" * (len(rows[u]) != 1)
            faults[u] = f"has {len(rows[u])} sample{plural}, {n_train} to train and {n_test} to test"
            if dataset.groups is not None and len(rows[u]) > 1:
                faults[u] = f"has {len(rows[u])} samples of one group, which is not divided"
                faults[u] += " unless --group-column is off" * (dataset.found_groups is not None)
    listed = "; ".join(f"client {names[u]!r} {fault}" for u, fault in list(faults.items())[:MAX_CLIENTS_IN_NOTE])
    more = f"; and {len(faults) - MAX_CLIENTS_IN_NOTE} more" if len(faults) > MAX_CLIENTS_IN_NOTE else ""
    if faults and small_clients == "error":
        drop = ', or leave them out with --small-clients drop (small_clients="drop")' * (min_clients > 1)
        raise DataError(f"{name}: {listed}{more}; give such clients more data{drop}")
    usable = [u for u in range(len(rows)) if u not in faults and u not in small]
    notes = []
    if small:
        named = list_some(list(small.values()), MAX_CLIENTS_IN_NOTE)
        notes.append(f"{len(small)} of {len(rows)} clients have fewer than {min_rows} rows and are left out: {named}.")
    if not usable:
        why = "; ".join([*(note.rstrip(".") for note in notes), *([f"{listed}{more}"] if faults else [])])
        raise DataError(
            f"{name}: no client is left: {why}; give the clients more data{' or a smaller --min-rows' * bool(small)}"
        )
    if min_clients > 1:
        check_two_clients(name, [names[u] for u in usable], len(faults) + len(small))
    notes += [f"{len(faults)} of {len(rows)} clients are left out: {listed}{more}."] if faults else []
    if alone := [names[u] for u in single if u not in faults]:
        verb, listing = "holds" if len(alone) == 1 else "hold", list_some(alone, MAX_CLIENTS_IN_NOTE)
        notes.append(f"{len(alone)} of {len(usable)} clients {verb} a single class: {listing}.")
    bare = [names[u] for u in usable if sizes[u][1] == 0]
    if 0 < len(bare) < len(usable):
        listing = list_some(bare, MAX_CLIENTS_IN_NOTE)
        notes.append(f"{len(bare)} of {len(usable)} clients have no validation part: {listing}.")
    return usable, tuple(notes)


FEW_ROWS, MANY_ROWS = 20, 200
"""A note suggests `min_rows` where some clients have fewer rows, and others more than many."""


def suggest_min_rows(members: Sequence[Client]) -> tuple[str, ...]:
    """Say that some clients have a handful of rows, and others hundreds."""
    sizes = np.array([len(client.all) for client in members])
    n_few = int((sizes < FEW_ROWS).sum())
    if not n_few or sizes.max() < MANY_ROWS or len(sizes) - n_few < 2:
        return ()
    return (
        f"Clients have {sizes.min()} to {sizes.max():,} rows, {n_few} of them fewer than {FEW_ROWS}; --min-rows "
        f"{FEW_ROWS} leaves these out.",
    )


def describe_groups(dataset: Dataset, members: Sequence[Client]) -> tuple[str, ...]:
    """Say what keeps rows in one part, and how many groups have rows at several clients, in different parts."""
    if dataset.groups is None:
        return ()
    notes = []
    if dataset.found_groups is not None:
        notes.append(f"Rows with the same {dataset.found_groups!r} stay in one part; --group-column off splits them.")
    holders = np.concatenate([np.unique(dataset.groups[client.all]) for client in members])
    groups, times = np.unique(holders, return_counts=True)
    if n_shared := int((times > 1).sum()):
        notes.append(
            f"{n_shared:,} of {len(groups):,} groups have rows at several clients, so that one client may train on a "
            "group that another one is tested on."
        )
    return tuple(notes)


def check_two_clients(name: str, names: Sequence[str], left_out: int = 0) -> None:
    """Refuse a federation of a single client."""
    if len(names) < 2:
        why = f" after {left_out} too small or of one class were left out" if left_out else ""
        todo = "give these clients more data" if left_out else "divide the data among more clients"
        who = f"only {names[0]!r}" if names else "none"
        raise DataError(f"{name}: a federation needs at least two clients, but there is {who}{why}; {todo}")
