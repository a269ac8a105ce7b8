"""Writing files so that a crash leaves the old one or the new one, never half of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it takes the place of `path` when the block ends well.

    A link stays, and the file that it points to is replaced; a device or a pipe is written to as it is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing; to standard output where `path` is that, as /dev/stdout."""
    if _is_stdout(path):
        print(text, flush=True)  # to open it again would write over what was printed
        return
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False
