"""The store of one run: per-client scores, traffic and mixing matrices in SQLite."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core import MixingMatrices
from ..engines import Scores
from ..errors import RunError
from .mixing import MixingLog, natural

OTHERS, PATIENCE = 5.0, 600.0
"""Seconds for which another writer is waited for, and until nobody reads: a reader may be halted in a copy."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seconds REAL, bytes_up INTEGER, bytes_down INTEGER, steps INTEGER, dropped TEXT,
    absent TEXT NOT NULL DEFAULT '[]');
CREATE TABLE IF NOT EXISTS scores (
    round INTEGER, point TEXT, part TEXT, client INTEGER, n INTEGER, correct INTEGER, loss REAL,
    PRIMARY KEY (round, point, part, client)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mixing (
    round INTEGER, component TEXT, row_clients TEXT, column_clients TEXT, weights BLOB,
    PRIMARY KEY (round, component)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS faults (
    round INTEGER, client INTEGER, reason TEXT, PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS traffic (
    direction TEXT, part TEXT, bytes INTEGER, PRIMARY KEY (direction, part)) WITHOUT ROWID;
"""


class RoundRecord(NamedTuple):
    """One finished round; seconds, bytes and steps are totals since the start.

    `dropped` are clients whose training was not finite, `absent` those that were asked and did not answer.
    """

    round: int
    seconds: float
    bytes_up: int
    bytes_down: int
    steps: int
    dropped: list[int]
    absent: list[int] = []  # noqa: RUF012 (nobody changes it)


class RunStore:
    """Appends what each round gives; nothing is durable, or to be seen by other processes, before `commit`."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=OTHERS)
            # A commit must survive what a checkpoint, written right after it, survives.
            self._db.execute("PRAGMA synchronous=FULL")
            # In KiB. What does not fit is written before the commit, and from then to the commit nobody can read.
            self._db.execute("PRAGMA cache_size=-65536")
            self._db.executescript(SCHEMA)
            self._add_absent()
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot open {path}: {error}") from error

    @classmethod
    def snapshot(cls, path: Path) -> "RunStore":
        """A copy in memory of the store as it is now, while another process may write it.

        Raises:
            RunError: there is none, or it is damaged.

        """
        store = cls.__new__(cls)
        store._db = sqlite3.connect(":memory:")
        try:
            with closing(_reader(path)) as source:
                source.backup(store._db)
            store._db.executescript(SCHEMA)
            store._add_absent()
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot read {path}: {error}") from error
        return store

    @classmethod
    def beside(cls, path: Path) -> "RunStore":
        """The store to read while another process may write it, which must wait for as long as an answer takes.

        It is not copied, so that little can be asked of a large one, and one answer may be older than the next.

        Raises:
            RunError: there is none, it is damaged, or it is locked.

        """
        store = cls.__new__(cls)
        try:
            store._db = _reader(path)
            if store._lacks_absent():
                store.close()
                return cls.snapshot(path)
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot read {path}: {error}") from error
        return store

    def _lacks_absent(self) -> bool:
        return "absent" not in [row[1] for row in self._db.execute("PRAGMA table_info(rounds)")]

    def _add_absent(self) -> None:
        """Give an older store the column that it lacks, so that its run can be read."""
        if self._lacks_absent():
            self._db.execute("ALTER TABLE rounds ADD COLUMN absent TEXT NOT NULL DEFAULT '[]'")

    def add_round(self, record: RoundRecord) -> None:
        """Add a finished round."""
        *numbers, dropped, absent = record
        self._db.execute(
            "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*numbers, json.dumps(dropped), json.dumps(absent)),
        )

    def add_scores(
        self, round_: int, point: str, part: str, scores: Scores, ids: Tensor | None = None
    ) -> None:
        """Add the scores (E,) on one part at one point (received, trained, global) of clients `ids`; None: 0 to E - 1.

        At `global`, it is the one global model of the method that is scored on every client's part.
        """
        who = range(len(scores.n)) if ids is None else ids.tolist()
        columns = (who, scores.n.tolist(), scores.correct.tolist(), scores.loss.tolist())
        self._db.executemany(
            "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((round_, point, part, *row) for row in zip(*columns, strict=True)),
        )

    def add_faults(self, round_: int, reasons: Mapping[int, str]) -> None:
        """Add why clients that were asked in a round have no part in it."""
        self._db.executemany(
            "INSERT INTO faults VALUES (?, ?, ?)", ((round_, who, why) for who, why in reasons.items())
        )

    def faults(self) -> list[tuple[int, int, str]]:
        """(round, client, reason) of those that were asked and whose round was lost, in order."""
        return list(self._db.execute("SELECT round, client, reason FROM faults ORDER BY round, client"))

    def add_mixing(self, round_: int, mixing: MixingMatrices) -> None:
        """Add the mixing matrices of one round."""
        rows, columns = json.dumps(mixing.rows.tolist()), json.dumps(mixing.columns.tolist())
        for component, weights in mixing.weights.items():
            blob = weights.detach().cpu().float().contiguous().numpy().tobytes()
            self._db.execute(
                "INSERT INTO mixing VALUES (?, ?, ?, ?, ?)", (round_, component, rows, columns, blob)
            )

    def set_traffic(self, total: Mapping[str, Mapping[str, int]]) -> None:
        """Set the bytes since the start: `up` and `down`, each by layer or other part of what travels."""
        rows = [(way, part, count) for way, parts in total.items() for part, count in parts.items()]
        self._db.execute("DELETE FROM traffic")
        self._db.executemany("INSERT INTO traffic VALUES (?, ?, ?)", rows)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes since the start: `up` and `down`, each by layer or other part of what travels."""
        found: dict[str, dict[str, int]] = {"up": {}, "down": {}}
        for way, part, count in self._db.execute("SELECT direction, part, bytes FROM traffic"):
            found[way][part] = count
        return {
            way: {part: parts[part] for part in sorted(parts, key=natural)} for way, parts in found.items()
        }

    def commit(self) -> None:
        """Make everything so far durable, and seen by other processes.

        Raises:
            RunError: it cannot be written, or somebody has read for longer than PATIENCE.

        """
        try:
            self._db.execute(f"PRAGMA busy_timeout={1000 * PATIENCE:.0f}")
            self._db.commit()
            self._db.execute(f"PRAGMA busy_timeout={1000 * OTHERS:.0f}")
        except sqlite3.OperationalError as error:
            raise RunError(
                f"cannot write the numbers of the run: {error}; see that there is room on the disk, and that no "
                "halted process is reading them, then go on with --resume"
            ) from error

    def forget_after(self, round_: int) -> None:
        """Delete what was stored after a round, before it is computed again."""
        for table in ("rounds", "scores", "mixing", "faults"):
            self._db.execute(f"DELETE FROM {table} WHERE round > ?", (round_,))  # noqa: S608 (no user input)
        self._db.commit()

    def rounds(self, since: int = 0) -> list[RoundRecord]:
        """The finished rounds in order, from round `since` on."""
        found = self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (since,))
        return [
            RoundRecord(r, s, up, down, steps, json.loads(dropped), json.loads(absent))
            for r, s, up, down, steps, dropped, absent in found
        ]

    def scores(self, part: str, since: int = 0) -> Iterator[tuple[int, str, NDArray[Any]]]:
        """(round, point, samples, right answers and summed loss, each (E,)) of one part, in order, from `since` on."""
        found = self._db.execute(
            "SELECT round, point, n, correct, loss FROM scores WHERE round >= ? AND part = ? "
            "ORDER BY round, point, client",
            (since, part),
        )
        key: tuple[int, str] | None = None
        block: list[tuple[float | None, ...]] = []
        for round_, point, *values in found:
            if key is not None and (round_, point) != key:
                yield *key, _numbers(block)
                block = []
            key = (round_, point)
            block.append(tuple(values))
        if key is not None:
            yield *key, _numbers(block)

    def means(self, point: str, since: int = 0) -> dict[int, float]:
        """Evaluated round -> mean test accuracy over clients at one point, from round `since` on."""
        found = self._db.execute(
            "SELECT round, AVG(1.0 * correct / n) FROM scores "
            "WHERE round >= ? AND point = ? AND part = 'test' AND n > 0 GROUP BY round",
            (since, point),
        )
        return dict(found.fetchall())

    def last(self, part: str) -> dict[tuple[int, str], float]:
        """(client, point) -> accuracy on one part, when the client was last evaluated at that point."""
        found = self._db.execute(
            # Beside MAX, SQLite takes the other columns from the row that has it.
            "SELECT client, point, n, correct, MAX(round) FROM scores WHERE part = ? GROUP BY client, point",
            (part,),
        )
        return {(client, point): correct / n for client, point, n, correct, _ in found if n}

    def mixing(self, n_clients: int) -> MixingLog:
        """The mixing matrices, read when they are looked at."""
        return MixingLog(self._db, n_clients)

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _numbers(block: list[tuple[float | None, ...]]) -> NDArray[Any]:
    """Columns of rows; NaN where SQLite, which has none, holds NULL."""
    return np.array(block, dtype=float).T


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that reads, also where the writer was killed in the middle of a commit."""
    where = path.absolute().as_uri()
    db = sqlite3.connect(f"{where}?mode=ro", uri=True)
    try:
        db.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        db.close()
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # Half a commit is there, which only one who may write can take back, as resuming would.
        db = sqlite3.connect(f"{where}?mode=rw", uri=True)
    except BaseException:
        db.close()
        raise
    return db
