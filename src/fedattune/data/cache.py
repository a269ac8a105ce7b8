"""A cache on disk of arrays that take long to decode: .npy files that are mapped, with a header that is checked.

An entry is a folder. It is keyed by the content of the files that it was made from, so that a file which was replaced
is noticed whatever its name, size and time; what can be read from it is compared with the hashes in its header, so that
a damaged one is made anew.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..files import write_text
from .dataset import Array, fingerprint
from .mapped import open_mapped, save_mapped

VERSION = 4
HEADER = "header.json"


class Entry(NamedTuple):
    """Named arrays, their fingerprints, and what else is kept with them."""

    arrays: Mapping[str, Array]
    prints: Mapping[str, str]  # of the groups of arrays that were asked for
    about: Mapping[str, Any]


def folder() -> Path | None:
    """Where entries lie; None where FEDATTUNE_CACHE is `off`, or where there is no home folder to look in.

    FEDATTUNE_CACHE names the folder, else it is `cache` in FEDATTUNE_HOME, else `fedattune/arrays` in the user's
    folder for caches (XDG_CACHE_HOME, or what the system has for that).
    """
    given, home = os.environ.get("FEDATTUNE_CACHE"), os.environ.get("FEDATTUNE_HOME")
    try:
        if given:
            return None if given.lower() == "off" else Path(given).expanduser()
        return Path(home).expanduser() / "cache" if home else _user_caches() / "fedattune" / "arrays"
    except RuntimeError:  # a user without a home
        return None


def _user_caches() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    if given and Path(given).is_absolute():  # the specification says that others are to be ignored
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def key_of(files: Sequence[Path], *what: Any) -> str:
    """A key of the files' contents, in order, and of `what` is made of them.

    Raises:
        OSError: a file cannot be read.

    """
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(json.dumps([VERSION, digests, what]).encode()).hexdigest()[:32]


def read(key: str, groups: Sequence[tuple[str, ...]]) -> Entry | None:
    """The entry, if there is one that is whole; each group of arrays is hashed together.

    Arrays of a group that the entry does not have are left out.
    """
    where = folder()
    if where is None:
        return None
    try:
        header = json.loads((where / key / HEADER).read_text(encoding="utf-8"))
        check = header.pop("check")
        if check != _hash(header):
            return None
        arrays = {name: open_mapped(where / key / f"{name}.npy") for name in header["arrays"]}
        prints = _prints(arrays, groups)
        return Entry(arrays, prints, header["about"]) if prints == header["prints"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def write(
    key: str, arrays: Mapping[str, Array], groups: Sequence[tuple[str, ...]], about: Mapping[str, Any]
) -> Entry:
    """Keep the arrays, and return them mapped; as they were given where nothing can be written."""
    prints = _prints(arrays, groups)
    where = folder()
    if where is not None:
        with suppress(OSError):
            (where / key).mkdir(parents=True, exist_ok=True)
            arrays = {name: save_mapped(where / key / f"{name}.npy", array) for name, array in arrays.items()}
            header = {"about": dict(about), "arrays": list(arrays), "prints": prints}
            write_text(where / key / HEADER, json.dumps(header | {"check": _hash(header)}))
    return Entry(arrays, prints, about)


def _prints(arrays: Mapping[str, Array], groups: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """The fingerprint, which covers type and shape, of each group that has arrays."""
    held = {",".join(group): [arrays[name] for name in group if name in arrays] for group in groups}
    return {names: fingerprint(*members) for names, members in held.items() if members}


def _hash(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
