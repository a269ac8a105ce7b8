"""A cache on disk of arrays that take long to decode: .npy files that are mapped, with a header that is checked.

An entry is a folder. It is keyed by the content of the files that it was made from, so that a file which was replaced
is noticed whatever its name, size and time; what can be read from it is compared with the hashes in its header, so that
a damaged one is made anew.

Arrays in .npy files, mapped into memory: all processes that open one share its pages.
"""

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.io import replace_atomically, write_text
from .dataset import hash_arrays
from .types import Array

_mapped_files: dict[int, tuple[Path, tuple[int, ...], np.dtype[Any]]] = {}
"""Address of an array that is mapped here -> its file and its bytes."""


def open_mapped(path: Path) -> Array:
    """The array in a .npy file, its pages read when they are first looked at.

    What is written to it stays with this process and never reaches the file.

    Raises:
        OSError, ValueError: there is no such file, or it holds no array.

    """
    found = np.load(path, mmap_mode="c", allow_pickle=False)
    address = found.ctypes.data
    _mapped_files[address] = path.resolve(), found.shape, found.dtype
    weakref.finalize(found, _mapped_files.pop, address, None)
    array: Array = found.view(np.ndarray)
    return array


def find_mapped_file(array: Array | torch.Tensor) -> Path | None:
    """The file that a whole array was mapped from by this process, if it is still there, or None."""
    own: Array = array.numpy() if isinstance(array, torch.Tensor) else array
    if (known := _mapped_files.get(own.ctypes.data)) is None:
        return None
    path, shape, dtype = known
    whole = own.flags.c_contiguous and (own.shape, own.dtype) == (shape, dtype)
    return path if whole and path.exists() else None


def save_mapped(path: Path, array: Array) -> Array:
    """Write an array to a .npy file, all or nothing, and return the one that is mapped from it."""
    with replace_atomically(path) as new, new.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    return open_mapped(path)


CACHE_VERSION = 4


HEADER_FILE = "header.json"


class CacheEntry(NamedTuple):
    """Named arrays, their fingerprints, and what else is kept with them."""

    arrays: Mapping[str, Array]
    prints: Mapping[str, str]  # of the groups of arrays that were asked for
    about: Mapping[str, Any]


def find_cache_folder() -> Path | None:
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


def make_key(files: Sequence[Path], *what: Any) -> str:
    """A key of the files' contents, in order, and of `what` is made of them.

    Raises:
        OSError: a file cannot be read.

    """
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(json.dumps([CACHE_VERSION, digests, what]).encode()).hexdigest()[:32]


def read_entry(key: str, groups: Sequence[tuple[str, ...]]) -> CacheEntry | None:
    """The entry, if there is one that is whole; each group of arrays is hashed together.

    Arrays of a group that the entry does not have are left out.
    """
    where = find_cache_folder()
    if where is None:
        return None
    try:
        header = json.loads((where / key / HEADER_FILE).read_text(encoding="utf-8"))
        check = header.pop("check")
        if check != _hash_header(header):
            return None
        arrays = {name: open_mapped(where / key / f"{name}.npy") for name in header["arrays"]}
        prints = _hash_groups(arrays, groups)
        return CacheEntry(arrays, prints, header["about"]) if prints == header["prints"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def write_entry(
    key: str, arrays: Mapping[str, Array], groups: Sequence[tuple[str, ...]], about: Mapping[str, Any]
) -> CacheEntry:
    """Keep the arrays, and return them mapped; as they were given where nothing can be written."""
    prints = _hash_groups(arrays, groups)
    where = find_cache_folder()
    if where is not None:
        with suppress(OSError):
            (where / key).mkdir(parents=True, exist_ok=True)
            arrays = {name: save_mapped(where / key / f"{name}.npy", array) for name, array in arrays.items()}
            header = {"about": dict(about), "arrays": list(arrays), "prints": prints}
            write_text(where / key / HEADER_FILE, json.dumps(header | {"check": _hash_header(header)}))
    return CacheEntry(arrays, prints, about)


def _hash_groups(arrays: Mapping[str, Array], groups: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """The fingerprint, which covers type and shape, of each group that has arrays."""
    held = {",".join(group): [arrays[name] for name in group if name in arrays] for group in groups}
    return {names: hash_arrays(*members) for names, members in held.items() if members}


def _hash_header(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
