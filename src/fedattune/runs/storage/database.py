"""The SQLite file of a run: connections, the sentences behind its errors, and checks of what is read from it."""

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import RunError, summarize_error
from ...core.io import parse_json

TABLES = ("rounds", "evaluations", "mixing", "faults", "traffic")

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


def make_store_error(what: str, path: Path | None, error: Exception) -> RunError:
    """Make the error for a store that cannot be read or written: whether the disk, a process or the file is to blame.

    Args:
        what: read or write.
        path: the file.
        error: the error of SQLite, or of what was read.

    """
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the rest of the number tells details
    where = path or "the metrics of the run"
    go_on = (
        ", then continue with --resume: all rounds to the last checkpoint are kept" if what == "write" else ""
    )
    if primary in OF_THE_DISK:
        return RunError(f"cannot {what} {where}: {OF_THE_DISK[primary]}{go_on} ({error})")
    if primary in OF_OTHERS:
        return RunError(
            f"cannot {what} {where}: {error}; check that the disk has space and that no halted process is reading "
            f"it{go_on}"
        )
    return RunError(
        f"cannot {what} {where}: it is damaged ({summarize_error(error)}); restore it from a copy, or train that run "
        "again"
    )


@contextmanager
def explain_errors(what: str, path: Path | None) -> Iterator[None]:
    """Turn errors of SQLite, and of entries that are not as the run wrote them, into one sentence.

    Raises:
        RunError: there was such an error.

    """
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError) as error:
        raise make_store_error(what, path, error) from error


def check_version(db: sqlite3.Connection, path: Path | None) -> None:
    """Refuse a store of a version that kept one row per client and round, and one that lacks a table.

    Raises:
        RunError: the store is of such a version.
        ValueError: a table is missing.

    """
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "scores" in names:
        raise RunError(
            f"{path} was written by an older FedAttune, before 2026-11-24; read it with that version, or train again"
        )
    if names and (missing := [name for name in TABLES if name not in names]):
        raise ValueError(f"the table {missing[0]} is missing")


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection for reading, even if the writer was killed during a commit.

    Raises:
        sqlite3.Error: the file is missing, damaged or locked.

    """
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


def check_count(value: Any, what: str, least: int = 0) -> int:
    """Return a whole number that was read from the store.

    Raises:
        ValueError: it is none, or below the least.

    """
    if not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{what}: expected a number from {least}, got {value!r:.40}")
    return value


def check_seconds(value: Any) -> float:
    """Return a time in seconds that was read from the store.

    Raises:
        ValueError: it is none.

    """
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"seconds: expected a number from 0, got {value!r:.40}")
    return float(value)


def check_text(value: Any, what: str) -> str:
    """Return a text that was read from the store.

    Raises:
        ValueError: it is none.

    """
    if not isinstance(value, str):
        raise ValueError(f"{what}: expected text, got {value!r:.40}")
    return value


def parse_clients(text: Any, what: str, n_clients: int | None) -> list[int]:
    """Return numbers of clients that were stored as JSON.

    Raises:
        ValueError: the text is no list of different clients of the run.

    """
    numbers = parse_json(check_text(text, what))
    if not isinstance(numbers, list) or len(set(numbers)) < len(numbers):
        raise ValueError(f"{what}: expected different clients, got {text!r:.40}")
    for number in numbers:
        if isinstance(number, bool) or (
            check_count(number, what) >= n_clients if n_clients is not None else False
        ):
            raise ValueError(f"{what}: there is no client {number!r:.40}")
    return numbers


def format_clients(numbers: Any) -> str:
    """Return numbers of clients as JSON for the store."""
    return json.dumps(numbers)
