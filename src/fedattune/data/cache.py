"""A cache on disk of arrays that take long to decode: .npy files mapped into memory, and a header.

An entry is a folder. The content of the source files is its key, so that a replaced file is noticed whatever its name,
size and time. All data read from an entry are compared with the hashes in its header, so that a damaged entry is
made anew. All processes that open an entry share its pages in memory.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from ..core.io import find_cache_folder, replace_atomically, write_text
from .dataset import hash_arrays
from .types import Array

CACHE_VERSION = 5
HEADER_FILE = "header.json"
_mapped_files: dict[int, tuple[Path, tuple[int, ...], np.dtype[Any]]] = {}
"""Address of an array that this process has mapped -> file, shape and type."""


def open_mapped(path: Path) -> Array:
    """Map the array in a .npy file into memory. Writing to the array never reaches the file."""
    mapped = np.load(path, mmap_mode="c", allow_pickle=False)
    address = mapped.ctypes.data
    _mapped_files[address] = path.resolve(), mapped.shape, mapped.dtype
    weakref.finalize(mapped, _mapped_files.pop, address, None)
    return cast(Array, mapped.view(np.ndarray))


def find_mapped_file(array: Array | torch.Tensor) -> Path | None:
    """Return the file that this process has mapped a whole array from, if the file is still there."""
    own: Array = array.numpy() if isinstance(array, torch.Tensor) else array
    if (entry := _mapped_files.get(own.ctypes.data)) is None:
        return None
    path, shape, dtype = entry
    is_whole = own.flags.c_contiguous and (own.shape, own.dtype) == (shape, dtype)
    return path if is_whole and path.exists() else None


def save_mapped(path: Path, array: Array) -> Array:
    """Write an array to a .npy file, all or nothing, and return the array mapped from the file."""
    with replace_atomically(path) as new, new.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    return open_mapped(path)


class CacheEntry(NamedTuple):
    """Named arrays, the fingerprint of each group of arrays, and other values."""

    arrays: Mapping[str, Array]
    fingerprints: Mapping[str, str]
    about: Mapping[str, Any]


def make_key(files: Sequence[Path], *options: Any) -> str:
    """Return a key of the files' contents, in order, and of the options that decide how to decode them."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(json.dumps([CACHE_VERSION, digests, options]).encode()).hexdigest()[:32]


def read_or_make(
    key: str, groups: Sequence[tuple[str, ...]], make: Callable[[], tuple[Mapping[str, Array], Mapping[str, Any]]]
) -> CacheEntry:
    """Read the entry of a key, its arrays mapped into memory; if there is none that is whole, make it and keep it.

    If the cache cannot be written, the arrays are as `make` returns them.
    """
    root = find_cache_folder()
    if root and (entry := _read(root / key, groups)):
        return entry
    arrays, about = make()
    fingerprints = _hash_groups(arrays, groups)
    if root:
        with suppress(OSError):
            folder = root / key
            folder.mkdir(parents=True, exist_ok=True)
            arrays = {name: save_mapped(folder / f"{name}.npy", array) for name, array in arrays.items()}
            header = {"about": dict(about), "arrays": list(arrays), "fingerprints": fingerprints}
            write_text(folder / HEADER_FILE, json.dumps(header | {"check": _hash_header(header)}))
    return CacheEntry(arrays, fingerprints, about)


def _read(folder: Path, groups: Sequence[tuple[str, ...]]) -> CacheEntry | None:
    """Read an entry; None if there is none, or if it is damaged."""
    try:
        header = json.loads((folder / HEADER_FILE).read_text(encoding="utf-8"))
        if header.pop("check") != _hash_header(header):
            return None
        arrays = {name: open_mapped(folder / f"{name}.npy") for name in header["arrays"]}
        fingerprints = _hash_groups(arrays, groups)
        is_whole = fingerprints == header["fingerprints"]
        return CacheEntry(arrays, fingerprints, header["about"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def _hash_groups(arrays: Mapping[str, Array], groups: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Return the fingerprint, which covers type and shape, of each group that has arrays."""
    members_of = {",".join(group): [arrays[name] for name in group if name in arrays] for group in groups}
    return {names: hash_arrays(*members) for names, members in members_of.items() if members}


def _hash_header(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
