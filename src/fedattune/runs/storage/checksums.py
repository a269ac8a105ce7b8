"""Checksums of the files of a run: a file that somebody edited, swapped or damaged is named, and never just read.

A folder lists its finished files in `SHA256SUMS`, in the form of `sha256sum`, which can check it, too. Checksums find
accidents and careless edits. Whoever means to deceive can write a new list, and only a copy elsewhere tells.

Folders without a list, as older versions wrote them, are read without this check.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...core.errors import RunError
from ...core.io import write_text

CHECKSUM_FILE = "SHA256SUMS"
"""The list: a line `HASH  NAME` for each file, its name relative to the folder."""

COMPLETE_WITH = "result.json"
"""A list with this name is complete: other files of the run do not belong to it."""

LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")

_hashes: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File -> its state when it was read, and its hash: `watch` reads the same files again and again."""


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Read the list of a folder: name -> hash; None if the folder has no list.

    Raises:
        RunError: the list is damaged.

    """
    file = folder / CHECKSUM_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}; {_ADVICE_ON_LIST}") from error
    matches = [LINE.fullmatch(line) for line in lines]
    if not lines or None in matches:
        raise RunError(f"{file} is damaged: expected lines with a hash and a name; {_ADVICE_ON_LIST}")
    return {match[2]: match[1] for match in matches if match}


_ADVICE_ON_LIST = "restore it from a copy, or remove it to read the other files without a check"


def set_checksums(folder: Path, files: Iterable[Path], contents: Mapping[Path, str] | None = None) -> None:
    """Write the list of a folder anew.

    Args:
        folder: the folder.
        files: finished files in it; missing ones are left out.
        contents: texts of files that are written after the list.

    """
    sums = {file.relative_to(folder).as_posix(): _hash_file(file) for file in files if file.is_file()}
    for file, text in (contents or {}).items():
        sums[file.relative_to(folder).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / CHECKSUM_FILE, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def verify_file(file: Path, folder: Path, remedy: str) -> None:
    """Compare a file with the list of its folder before it is read.

    Args:
        file: the file; it may be missing if the list does not name it.
        folder: the folder with the list.
        remedy: what to do, for messages.

    Raises:
        RunError: the file is not the one that the run wrote.

    """
    sums = read_checksums(folder)
    if sums is None:
        return
    expected = sums.get(file.relative_to(folder).as_posix())
    if expected is None:
        if COMPLETE_WITH in sums and file.exists():
            raise RunError(
                f"{file} is no file that the run wrote: {CHECKSUM_FILE} does not name it; remove it"
            )
        return
    if not file.is_file():
        raise RunError(f"{file} is missing, and {CHECKSUM_FILE} names it; {remedy}")
    if (actual := _hash_file(file)) != expected:
        raise RunError(
            f"{file} is not as the run wrote it: somebody edited or replaced it, or it is damaged (its SHA-256 begins "
            f"with {actual[:8]}, and with {expected[:8]} in {CHECKSUM_FILE}); {remedy}"
        )


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, in hex digits.

    Raises:
        RunError: the file cannot be read.

    """
    try:
        about = file.stat()
        state = (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        known = _hashes.get(file)
        if known is None or known[0] != state:
            with file.open("rb") as content:
                known = _hashes[file] = (state, hashlib.file_digest(content, "sha256").hexdigest())
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    return known[1]
