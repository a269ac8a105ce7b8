"""The age of samples, by which `--split time` trains on a client's oldest rows and tests on its newest ones."""

from collections.abc import Sequence

import numpy as np

from ..core.errors import ConfigError
from .client_index import ClientIndex
from .dataset import Dataset, Times
from .splits import SplitKind
from .types import Index


def read_times(
    dataset: Dataset, split: SplitKind, column: str | None, *, is_stratified: bool, split_number: int
) -> Times | None:
    """Return the age of all samples; None if chance decides their part.

    Args:
        dataset: the samples.
        split: what decides the part of a sample.
        column: column of a table with the age of rows; None for the only date column.
        is_stratified: whether each part should have the same share of every class.
        split_number: number of the split.

    Raises:
        ConfigError: the options do not go together, or the data have no such column.
        DataError: the column cannot be read.

    """
    if split not in ("random", "time"):
        raise ConfigError(f"split must be 'random' or 'time', got {split!r}")
    if split == "random":
        if column is not None:
            raise ConfigError(f"--time-column {column} goes only with --split time; add it")
        return None
    if dataset.read_times is None:
        raise ConfigError(f"--split time needs a table with a column of dates, and {dataset.name} is none")
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
    return timed, (
        f"{n_all - n_timed} of {n_all} rows have no value in column {times.column!r} and are left out.",
    )


def describe_cuts(dataset: Dataset, times: Times, members: ClientIndex) -> tuple[str, ...]:
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
