"""The mixing matrices of a run, read from its store when they are looked at."""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError

MOST_CLIENTS = 5_000
"""Clients of whom there are mixing matrices with a row and a column for everybody."""


class Mixed(NamedTuple):
    """Matrices (R, K) of one round: how much client `rows[i]` was given of the model of client `columns[k]`."""

    rows: list[int]
    columns: list[int]
    weights: dict[str, NDArray[np.float32]]


class MixingLog(Mapping[int, dict[str, NDArray[np.float32]]]):
    """round -> component -> (N, N) matrix: how much of client k's model (column) client i (row) was given.

    Clients that were not part of the round have rows of NaN. `among` has the matrices without those, which is all
    that there is for more than MOST_CLIENTS clients. Components are in the order of their names, numbers in
    them counting as numbers.
    """

    def __init__(self, db: sqlite3.Connection, n_clients: int) -> None:
        self._db = db
        self._n = n_clients

    def __iter__(self) -> Iterator[int]:
        return (r for (r,) in self._db.execute("SELECT DISTINCT round FROM mixing ORDER BY round").fetchall())

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(DISTINCT round) FROM mixing").fetchone()[0])

    def __getitem__(self, round_: int) -> dict[str, NDArray[np.float32]]:
        rows, columns, weights = self.among(round_)
        if self._n > MOST_CLIENTS:
            raise RunError(
                f"a mixing matrix of {self._n:,} x {self._n:,} is too large; mixing.among({round_}) has the rows and "
                "columns of the clients that took part"
            )
        out: dict[str, NDArray[np.float32]] = {}
        for component, matrix in weights.items():
            out[component] = np.full((self._n, self._n), np.nan, dtype=np.float32)
            out[component][rows] = 0.0
            out[component][np.ix_(rows, columns)] = matrix
        return out

    def among(self, round_: int) -> Mixed:
        """The matrices of one round, of the clients that took part alone.

        Raises:
            KeyError: there are none of this round.

        """
        found = self._db.execute(
            "SELECT component, row_clients, column_clients, weights FROM mixing WHERE round = ?", (round_,)
        ).fetchall()
        if not found:
            raise KeyError(f"no mixing matrices of round {round_}; there are those of rounds {list(self)}")
        rows, columns = json.loads(found[0][1]), json.loads(found[0][2])
        found.sort(key=lambda row: natural(row[0]))
        return Mixed(
            rows,
            columns,
            {
                component: np.frombuffer(blob, dtype=np.float32).reshape(len(rows), len(columns))
                for component, _, _, blob in found
            },
        )

    def last(self) -> dict[str, NDArray[np.float32]]:
        """The matrices of the last round that has any; empty if none has."""
        rounds = list(self)
        return self[rounds[-1]] if rounds else {}


def natural(name: str) -> list[str | int]:
    """A key by which layer 4 comes before layer 11; text and numbers alternate, text first."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
