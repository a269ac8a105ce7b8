"""Store per-client scores, traffic and mixing matrices of one run in SQLite."""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import RunError, summarize_error
from ..core.faults import Fault
from ..core.io import natural_key
from ..core.payload import MixingMatrices
from ..engine.base import Scores

CREATE_TABLES = """
BEGIN;
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seconds REAL, bytes_up INTEGER, bytes_down INTEGER, steps INTEGER, diverged TEXT,
    absent TEXT);
CREATE TABLE IF NOT EXISTS evaluations (
    round INTEGER, point TEXT, part TEXT, scores BLOB, PRIMARY KEY (round, point, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mixing (
    round INTEGER, component TEXT, row_clients TEXT, column_clients TEXT, weights BLOB,
    PRIMARY KEY (round, component)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS faults (
    round INTEGER, client INTEGER, reason TEXT, PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS traffic (
    direction TEXT, part TEXT, bytes INTEGER, PRIMARY KEY (direction, part)) WITHOUT ROWID;
COMMIT;
"""
"""A kill leaves all tables or none."""

OF_THE_DISK = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_READONLY: "the file or its disk cannot be written to; make it writable",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that its folder exists and that you may use it",
    sqlite3.SQLITE_PERM: "access is denied; check the permissions of the file",
    sqlite3.SQLITE_IOERR: "the disk reports an error; check the disk",
}
"""Error of SQLite -> a sentence, where the file itself is not to blame."""
OF_OTHERS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Errors of SQLite by which another process holds the file."""


@contextmanager
def explain_errors(what: str, path: Path | None) -> Iterator[None]:
    """Turn errors of SQLite, and of entries that are not as the run wrote them, into one sentence."""
    try:
        yield
    except (sqlite3.Error, zlib.error, ValueError, TypeError, KeyError, OverflowError) as error:
        primary = getattr(error, "sqlite_errorcode", -1) & 0xFF  # the higher bits are details
        go_on = ", then continue with --resume: all rounds to the last checkpoint are kept" if what == "write" else ""
        if primary in OF_THE_DISK:
            why = f"{OF_THE_DISK[primary]}{go_on} ({error})"
        elif primary in OF_OTHERS:
            why = f"{error}; check that the disk has space and that no halted process is reading it{go_on}"
        else:
            why = f"it is damaged ({summarize_error(error)}); restore it from a copy, or train that run again"
        raise RunError(f"cannot {what} {path or 'the metrics of the run'}: {why}") from error


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection for reading, even if the writer was killed during a commit."""
    where = path.absolute().as_uri()
    db = sqlite3.connect(f"{where}?mode=ro", uri=True)
    try:
        db.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        db.close()
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # Only a connection that may write can roll back half a commit.
        db = sqlite3.connect(f"{where}?mode=rw", uri=True)
    except BaseException:
        db.close()
        raise
    return db


ZLIB_LEVEL = 1
"""The fastest compression: rows that are alike, and whole numbers, take little room already."""
SCORE_BYTES = 20
"""Bytes of one client's scores: client, samples and right predictions as int32, the sum of losses as float64."""
SHARE_MARK = b"f"
"""First byte of scores whose right predictions are sums of shares, float64, 24 bytes for each client."""


def pack_scores(clients: NDArray[Any], scores: Scores) -> bytes:
    """Pack the scores of clients (E,): column by column, and the clients' numbers as differences, to compress well."""
    has_shares = scores.correct.is_floating_point()
    types = ("<i4", "<f8", "<f8") if has_shares else ("<i4", "<i4", "<f8")
    columns = [np.diff(clients, prepend=0).astype("<i4")]
    columns += [values.cpu().numpy().astype(dtype) for values, dtype in zip(scores, types, strict=True)]
    content = b"".join(one.tobytes() for one in columns)
    return zlib.compress(SHARE_MARK * has_shares + content, ZLIB_LEVEL)


def unpack_scores(blob: bytes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the clients (E,), and samples, right predictions and sums of losses (3, E)."""
    raw = zlib.decompress(blob)
    if len(raw) % 4:  # it has the mark
        n = len(raw) // (SCORE_BYTES + 4)
        whole = np.frombuffer(raw, dtype="<i4", offset=1, count=2 * n).reshape(2, n)
        correct, loss = np.frombuffer(raw, dtype="<f8", offset=1 + 8 * n).reshape(2, n)
        return np.cumsum(whole[0], dtype=np.int64), np.stack([whole[1], correct, loss]).astype(np.float64)
    n = len(raw) // SCORE_BYTES
    whole = np.frombuffer(raw, dtype="<i4", count=3 * n).reshape(3, n)
    loss = np.frombuffer(raw, dtype="<f8", offset=12 * n)
    return np.cumsum(whole[0], dtype=np.int64), np.stack([whole[1], whole[2], loss]).astype(np.float64)


def unpack_weights(blob: bytes, rows: int, columns: int) -> NDArray[np.float32]:
    """Return a matrix (rows, columns) of single or half precision as float32."""
    raw = zlib.decompress(blob)
    dtype = np.float32 if len(raw) == 4 * rows * columns else np.float16
    return np.frombuffer(raw, dtype=dtype).reshape(rows, columns).astype(np.float32, copy=False)


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
            return iter([r for (r,) in rounds])

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
        """Read the matrices of one round, for the clients of the round only; KeyError if it has none."""
        with explain_errors("read", self._path):
            records = self._db.execute(
                "SELECT component, row_clients, column_clients, weights FROM mixing WHERE round = ?", (round_,)
            ).fetchall()
        if not records:
            raise KeyError(f"no mixing matrices of round {round_}; the run has matrices of rounds {list(self)}")
        with explain_errors("read", self._path):
            rows, columns = (json.loads(text) for text in records[0][1:3])
            records.sort(key=lambda record: natural_key(record[0]))
            weights = {component: unpack_weights(blob, len(rows), len(columns)) for component, _, _, blob in records}
        return RoundMixing(rows, columns, weights)

    def last(self) -> dict[str, NDArray[np.float32]]:
        """Read the matrices of the last round that has any; empty if none has."""
        rounds = list(self)
        return self[rounds[-1]] if rounds else {}


MAX_MIXING_BYTES = 8 << 20
"""Bytes of mixing matrices, before compression, above which rounds are thinned out."""
MIN_MIXING_ROUNDS = 4
"""Minimum number of rounds of mixing matrices, unless the matrices are larger than the limit."""
WRITE_LOCK_TIMEOUT_S, READER_TIMEOUT_S = 5.0, 600.0
"""Seconds to wait for another writer, and for readers to finish: a reader may be halted while it copies."""
SYNCHRONOUS = "FULL"
"""SQLite's setting that makes a commit as durable as the checkpoint that follows."""


class RoundRecord(NamedTuple):
    """One finished round; seconds, bytes and steps are totals since the start.

    `diverged` are clients whose training diverged, `absent` clients of the cohort that did not answer.
    """

    round: int
    seconds: float
    bytes_up: int
    bytes_down: int
    steps: int
    diverged: list[int]
    absent: list[int] = []  # noqa: RUF012 (a tuple field, not a class attribute)


class RunStore:
    """Append the results of each round; nothing is durable, or visible to other processes, before `commit`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._waiting_mixing: tuple[int, MixingMatrices] | None = None
        with explain_errors("write", path):
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=WRITE_LOCK_TIMEOUT_S)
            self._db.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
            # In KiB. SQLite writes larger changes before the commit, and until the commit nobody can read.
            self._db.execute("PRAGMA cache_size=-65536")
            self._db.executescript(CREATE_TABLES)

    @classmethod
    def load_copy(cls, path: Path) -> "RunStore":
        """Copy a store into memory, while another process may write it."""
        store = cls(None)
        store._path = path
        with explain_errors("read", path):
            with closing(connect_reader(path)) as source:
                source.backup(store._db)
            store._db.executescript(CREATE_TABLES)
        return store

    @classmethod
    def open_read_only(cls, path: Path) -> "RunStore":
        """Open a store to read it, while another process may write it; the writer waits while a query runs.

        The store is not copied, so small queries of a large store are cheap. One answer may be older than the next.
        """
        store = cls.__new__(cls)
        store._path, store._waiting_mixing = path, None
        with explain_errors("read", path):
            store._db = connect_reader(path)
        return store

    def add_round(self, record: RoundRecord) -> None:
        *numbers, diverged, absent = record
        self._insert("rounds", [(*numbers, json.dumps(diverged), json.dumps(absent))])

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            with explain_errors("write", self._path):
                self._db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608 (no user input)

    def add_scores(self, round_: int, point: str, part: str, scores: Scores, ids: Tensor | None = None) -> None:
        """Add scores (E,) of one round for clients `ids` (E,), by default 0 to E - 1.

        The point is received, trained, or global (the one global model on every client's part).
        """
        clients = np.arange(len(scores.n)) if ids is None else ids.cpu().numpy()
        self._insert("evaluations", [(round_, point, part, pack_scores(clients, scores))])

    def check_checkpoint(self, record: RoundRecord) -> None:
        """Check that the last round is the one of the checkpoint from which the run goes on."""
        records = self.rounds()
        if len(records) != record.round or (records and records[-1] != record):
            raise RunError(
                f"{self._path} does not belong to the checkpoint of round {record.round}; restore it from a copy, or "
                "remove the folder around it and resume, which trains this run again"
            )

    def add_faults(self, round_: int, faults: Mapping[int, Fault]) -> None:
        """Add why clients of the cohort have no part in a round."""
        self._insert("faults", [(round_, client, str(fault)) for client, fault in faults.items()])

    def faults(self) -> list[tuple[int, int, str]]:
        """List (round, client, reason) of the clients of the cohort that have no part in their round, in order."""
        with explain_errors("read", self._path):
            return list(self._db.execute("SELECT round, client, reason FROM faults ORDER BY round, client"))

    def add_mixing(self, round_: int, mixing: MixingMatrices) -> None:
        """Add the mixing matrices of one round; of many clients, the rounds between are thinned out.

        All rounds stay while they take less than MAX_MIXING_BYTES. Then every other one goes, but not the first and
        the last; of matrices that are larger themselves, the last alone stays, in half precision.
        """
        n_bytes = 4 * sum(weights.numel() for weights in mixing.weights.values())
        if n_bytes > MAX_MIXING_BYTES:
            self._waiting_mixing = round_, mixing  # a later one may take its place before anybody reads it
        else:
            self._write_mixing(round_, mixing, np.float32)
            self._thin_out_mixing(max(1, MAX_MIXING_BYTES // max(1, n_bytes)))

    def _flush_mixing(self) -> None:
        if self._waiting_mixing is not None:
            self._write_mixing(*self._waiting_mixing, np.float16)
            self._waiting_mixing = None
            self._thin_out_mixing(1)

    def _write_mixing(self, round_: int, mixing: MixingMatrices, dtype: type[np.floating[Any]]) -> None:
        rows, columns = json.dumps(mixing.rows.tolist()), json.dumps(mixing.columns.tolist())
        for component, weights in mixing.weights.items():
            values = weights.detach().cpu().float().contiguous().numpy().astype(dtype)
            self._insert("mixing", [(round_, component, rows, columns, zlib.compress(values.tobytes(), ZLIB_LEVEL))])

    def _thin_out_mixing(self, maximum: int) -> None:
        with explain_errors("write", self._path):
            rounds = [r for (r,) in self._db.execute("SELECT DISTINCT round FROM mixing ORDER BY round")]
            if len(rounds) <= maximum:
                return
            gone = rounds[:-1] if maximum < MIN_MIXING_ROUNDS else rounds[1:-1:2]
            self._db.executemany("DELETE FROM mixing WHERE round = ?", ((r,) for r in gone))

    def set_traffic(self, total: Mapping[str, Mapping[str, int]]) -> None:
        """Set the bytes since the start: `up` and `down`, each by layer or other part of the messages."""
        with explain_errors("write", self._path):
            self._db.execute("DELETE FROM traffic")
        self._insert("traffic", [(way, part, n) for way, parts in total.items() for part, n in parts.items()])

    def traffic(self) -> dict[str, dict[str, int]]:
        """Read the bytes since the start: `up` and `down`, each by layer or other part of the messages."""
        total: dict[str, dict[str, int]] = {"up": {}, "down": {}}
        with explain_errors("read", self._path):
            for way, part, count in self._db.execute("SELECT direction, part, bytes FROM traffic"):
                total[way][part] = count
        return {way: {part: parts[part] for part in sorted(parts, key=natural_key)} for way, parts in total.items()}

    def commit(self) -> None:
        """Make everything durable, and visible to other processes."""
        self._flush_mixing()
        with explain_errors("write", self._path):
            self._db.execute(f"PRAGMA busy_timeout={1000 * READER_TIMEOUT_S:.0f}")
            self._db.commit()
            self._db.execute(f"PRAGMA busy_timeout={1000 * WRITE_LOCK_TIMEOUT_S:.0f}")

    def forget_after(self, round_: int) -> None:
        """Delete the rounds after `round_`, before they are computed again."""
        with explain_errors("write", self._path):
            for table in ("rounds", "evaluations", "mixing", "faults"):
                self._db.execute(f"DELETE FROM {table} WHERE round > ?", (round_,))  # noqa: S608 (no user input)
            self._db.commit()

    def rounds(self, since: int = 0) -> list[RoundRecord]:
        """Read the finished rounds in order, from round `since` on."""
        with explain_errors("read", self._path):
            rows = self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (since,))
            return [RoundRecord._make([*row[:-2], *map(json.loads, row[-2:])]) for row in rows]

    def scores(self, part: str, since: int = 0) -> Iterator[tuple[int, str, NDArray[Any]]]:
        """Yield round, point, and samples, correct predictions and sum of losses (3, E) of one part in order."""
        where = "round >= ? AND part = ? ORDER BY round, point"
        for round_, point, _, values in self._read_evaluations(where, (since, part)):
            yield round_, point, values

    def _read_evaluations(
        self, where: str, values: Sequence[Any]
    ) -> Iterator[tuple[int, str, NDArray[Any], NDArray[Any]]]:
        with explain_errors("read", self._path):
            sql = f"SELECT round, point, scores FROM evaluations WHERE {where}"  # noqa: S608 (no user input)
            for round_, point, blob in self._db.execute(sql, values):
                clients, scores = unpack_scores(blob)
                yield round_, point, clients, scores

    def last_scores(self, part: str, point: str, clients: Sequence[int]) -> NDArray[np.float64]:
        """Read samples, right predictions and sum of losses (3, E) at the last evaluation of each of E clients.

        Clients that were never evaluated have NaN.
        """
        last, is_known = np.full((3, len(clients)), np.nan), np.zeros(len(clients), dtype=np.bool_)
        for *_, ids, scores in self._read_evaluations("part = ? AND point = ? ORDER BY round DESC", (part, point)):
            _, mine, theirs = np.intersect1d(clients, ids, assume_unique=True, return_indices=True)
            is_new = ~is_known[mine]
            last[:, mine[is_new]] = scores[:, theirs[is_new]]
            is_known[mine] = True
            if is_known.all():
                break
        return last

    def mixing(self, n_clients: int) -> MixingLog:
        self._flush_mixing()
        return MixingLog(self._db, n_clients, self._path)

    def close(self) -> None:
        self._db.close()
