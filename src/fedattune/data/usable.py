"""The choice of the clients that can take part: they have samples to train and to test."""

from collections.abc import Sequence
from typing import Literal

from ..core.errors import ConfigError, DataError, list_some
from .types import Array, Index

SmallClients = Literal["auto", "error", "drop"]
"""Treatment of clients that are too small: name them in an error, or leave them out with a note.

`auto` leaves out clients of the data's own, which nobody chose so small, and names clients that a partition made.
"""

MAX_CLIENTS_IN_NOTE = 5
"""Clients that one message or note names."""


def select_usable_clients(
    name: str,
    names: Sequence[str],
    rows: Sequence[Index],
    y: Array,
    classes: Sequence[str],
    *,
    sizes: Sequence[tuple[int, int, int]],
    small_clients: SmallClients,
    min_clients: int = 2,
) -> tuple[list[int], tuple[str, ...]]:
    """Select the clients that have samples to train and to test.

    Args:
        name: name of the data, for messages.
        names: names of the clients.
        rows: samples of each client.
        y: class numbers of all samples.
        classes: names of the classes.
        sizes: sizes of each client's training, validation and test part.
        small_clients: treatment of the other clients.
        min_clients: minimum number of clients.

    Returns:
        Numbers of the usable clients, and notes for the user.

    Raises:
        DataError: a client is not usable and `small_clients` is "error", or too few clients are usable.
        ConfigError: `small_clients` has another value.

    """
    if small_clients not in ("error", "drop"):
        raise ConfigError(f"small_clients must be 'error' or 'drop', got {small_clients!r}")
    single = [u for u, mine in enumerate(rows) if classes and len(mine) and y[mine].min() == y[mine].max()]
    faults = {}
    for u, (n_train, _, n_test) in enumerate(sizes):
        if not n_train or not n_test:
            plural = "s" * (len(rows[u]) != 1)
            faults[u] = f"has {len(rows[u])} sample{plural}, {n_train} to train and {n_test} to test"
    listed = "; ".join(
        f"client {names[u]!r} {fault}" for u, fault in list(faults.items())[:MAX_CLIENTS_IN_NOTE]
    )
    more = f"; and {len(faults) - MAX_CLIENTS_IN_NOTE} more" if len(faults) > MAX_CLIENTS_IN_NOTE else ""
    if faults and small_clients == "error":
        drop = ', or leave them out with --small-clients drop (small_clients="drop")' * (min_clients > 1)
        raise DataError(f"{name}: {listed}{more}; give such clients more data{drop}")
    usable = [u for u in range(len(rows)) if u not in faults]
    if not usable:
        raise DataError(f"{name}: no client is left: {listed}{more}; give the clients more data")
    if min_clients > 1:
        check_two_clients(name, [names[u] for u in usable], len(faults))
    notes = [f"{len(faults)} of {len(rows)} clients are left out: {listed}{more}."] if faults else []
    alone = [names[u] for u in single if u not in faults]
    if alone:
        verb = "holds" if len(alone) == 1 else "hold"
        notes.append(
            f"{len(alone)} of {len(usable)} clients {verb} a single class: {list_some(alone, MAX_CLIENTS_IN_NOTE)}."
        )
    bare = [names[u] for u in usable if sizes[u][1] == 0]
    if 0 < len(bare) < len(usable):
        listing = list_some(bare, MAX_CLIENTS_IN_NOTE)
        notes.append(f"{len(bare)} of {len(usable)} clients have no validation part: {listing}.")
    return usable, tuple(notes)


def settle_small_clients(small_clients: SmallClients, *, is_natural: bool) -> SmallClients:
    """Choose the treatment of small clients where it is `auto`."""
    if small_clients != "auto":
        return small_clients
    return "drop" if is_natural else "error"


def check_two_clients(name: str, names: Sequence[str], left_out: int = 0) -> None:
    """Refuse a federation of a single client.

    Args:
        name: name of the data, for messages.
        names: names of the clients.
        left_out: number of clients that were too small to take part.

    Raises:
        DataError: there are fewer than two clients.

    """
    if len(names) < 2:
        why = f" after {left_out} too small or of one class were left out" if left_out else ""
        todo = "give these clients more data" if left_out else "divide the data among more clients"
        who = f"only {names[0]!r}" if names else "none"
        raise DataError(f"{name}: a federation needs at least two clients, but there is {who}{why}; {todo}")
