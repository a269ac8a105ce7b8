"""Lock a folder for as long as a process lives that writes into it; a lock ends with its process, however that ends."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import RunError

LOCK_FILE, WRITER_FILE = ".lock", ".writer.json"
"""Names of the lock and of the file that says who holds it; both go when the lock is released."""


@contextmanager
def lock_folder(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Hold the lock of a folder inside the block; make the folder if it is missing.

    The operating system holds the lock, so it is gone with the process, also after a kill. With `is_new`, refuse a
    folder that holds anything: another process may have filled it since it was looked at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunError(f"{folder} is being written by {_describe_writer(folder)}; wait for it, or stop it") from error
    try:
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        if is_new and any(one.name not in (LOCK_FILE, WRITER_FILE) for one in folder.iterdir()):
            raise RunError(f"{folder} is not empty: another process has just filled it; give a new folder")
        (folder / WRITER_FILE).write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        for name in (WRITER_FILE, LOCK_FILE):
            with suppress(OSError):  # Windows keeps a file that is open
                (folder / name).unlink()
        lock.release()


def _describe_writer(folder: Path) -> str:
    try:
        about = json.loads((folder / WRITER_FILE).read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it has just begun
        return "another process"
