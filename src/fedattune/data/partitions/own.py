"""Divide samples by a partition of the package, or by a custom function whose answer is checked."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.errors import DataError, FedAttuneError, summarize_error
from ...core.options import look_up
from ...core.own_code import is_reference, load_function
from ..types import Array, Index
from . import PARTITIONS


def find_partition(name: str) -> Callable[..., Any]:
    """Return a partition by its name, or a custom function by its reference.

    Raises:
        ConfigError: there is none.

    """
    return (
        load_function(name, "the partition") if is_reference(name) else look_up("partition", name, PARTITIONS)
    )


def divide_samples(
    name: str, labels: Array, n_clients: int, seed: int, options: Mapping[str, Any]
) -> list[Index]:
    """Divide samples among clients.

    Args:
        name: name of a partition, or reference to a custom one.
        labels: label of each sample (n,).
        n_clients: number of clients.
        seed: seed of the division.
        options: keywords of the partition, checked.

    Returns:
        Sample numbers of each client.

    Raises:
        DataError: the samples cannot be divided so, or the user's function fails or returns anything but one array of
            sample numbers per client.

    """
    divide = find_partition(name)
    if not is_reference(name):
        return divide(labels, n_clients, seed, **options)  # type: ignore[no-any-return]
    try:
        parts = divide(labels.copy(), n_clients, seed, **options)
    except FedAttuneError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"the partition {name} failed: {summarize_error(error)}") from error
    if isinstance(parts, str | bytes) or not hasattr(parts, "__len__") or len(parts) != n_clients:
        what = f"{len(parts)} parts" if hasattr(parts, "__len__") else type(parts).__name__
        raise DataError(f"the partition {name} returned {what}, expected {n_clients} arrays, one per client")
    return [_check_rows(name, client, part, len(labels)) for client, part in enumerate(parts)]


def _check_rows(name: str, client: int, part: object, n: int) -> Index:
    """Check the sample numbers of one client.

    Raises:
        DataError: they are no sample numbers, or name a sample twice.

    """
    where, rows = f"the partition {name}, client {client}:", np.asarray(part)
    if rows.ndim != 1 or (len(rows) and not np.issubdtype(rows.dtype, np.integer)):
        raise DataError(
            f"{where} got an array {rows.shape} of {rows.dtype}, expected sample numbers (m,) of int"
        )
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        raise DataError(
            f"{where} sample numbers should be from 0 to {n - 1}, got {rows.min()} to {rows.max()}"
        )
    unique = np.unique(rows).astype(np.int64)
    if len(unique) < len(rows):
        raise DataError(f"{where} {len(rows) - len(unique)} samples are there twice; name each sample once")
    return unique
