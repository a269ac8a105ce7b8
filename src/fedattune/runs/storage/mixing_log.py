"""The mixing matrices of a run, read from its store on access."""

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import RunError
from ...core.io import natural_key
from .database import check_count, check_text, explain_errors, parse_clients
from .packing import unpack_weights

MAX_SQUARE_CLIENTS = 5_000
"""Clients up to which mixing matrices have a row and a column for every client."""


class RoundMixing(NamedTuple):
    """Matrices (R, K) of one round: the weight of the model of client `columns[k]` in the model of client `rows[i]`."""

    rows: list[int]
    columns: list[int]
    weights: dict[str, NDArray[np.float32]]


class MixingLog(Mapping[int, dict[str, NDArray[np.float32]]]):
    """Mixing matrices by round and component, read from the store on access.

    Entry (i, k) of a matrix (N, N) is the weight of client k's model in client i's model. Clients outside the round
    have rows of NaN. `among` returns the matrices without these clients; only `among` works above
    MAX_SQUARE_CLIENTS clients. Components are sorted by name, numbers in names by value.
    """

    def __init__(self, db: sqlite3.Connection, n_clients: int, path: Path | None = None) -> None:
        self._db = db
        self._n = n_clients
        self._path = path

    def __iter__(self) -> Iterator[int]:
        with explain_errors("read", self._path):
            rounds = self._db.execute("SELECT DISTINCT round FROM mixing ORDER BY round").fetchall()
            return iter([check_count(r, "mixing, round", 1) for (r,) in rounds])

    def __len__(self) -> int:
        with explain_errors("read", self._path):
            return int(self._db.execute("SELECT COUNT(DISTINCT round) FROM mixing").fetchone()[0])

    def __getitem__(self, round_: int) -> dict[str, NDArray[np.float32]]:
        rows, columns, weights = self.among(round_)
        if self._n > MAX_SQUARE_CLIENTS:
            raise RunError(
                f"a mixing matrix of {self._n:,} x {self._n:,} is too large; mixing.among({round_}) returns the "
                "rows and columns of the clients of the round"
            )
        out: dict[str, NDArray[np.float32]] = {}
        for component, matrix in weights.items():
            out[component] = np.full((self._n, self._n), np.nan, dtype=np.float32)
            out[component][rows] = 0.0
            out[component][np.ix_(rows, columns)] = matrix
        return out

    def among(self, round_: int) -> RoundMixing:
        """Read the matrices of one round, for the clients of the round only.

        Raises:
            KeyError: the round has no matrices.
            RunError: they are damaged.
        """
        with explain_errors("read", self._path):
            records = self._db.execute(
                "SELECT component, row_clients, column_clients, weights FROM mixing WHERE round = ?",
                (round_,),
            ).fetchall()
        if not records:
            raise KeyError(
                f"no mixing matrices of round {round_}; the run has matrices of rounds {list(self)}"
            )
        with explain_errors("read", self._path):
            if len({record[1:3] for record in records}) > 1:
                raise ValueError(f"mixing, round {round_}: the components are not of the same clients")
            rows, columns = (parse_clients(text, "mixing", self._n) for text in records[0][1:3])
            records.sort(key=lambda record: natural_key(check_text(record[0], "mixing, component")))
            weights = {
                component: unpack_weights(blob, len(rows), len(columns)) for component, _, _, blob in records
            }
        return RoundMixing(rows, columns, weights)

    def last(self) -> dict[str, NDArray[np.float32]]:
        """Read the matrices of the last round that has any; empty if none has."""
        rounds = list(self)
        return self[rounds[-1]] if rounds else {}
