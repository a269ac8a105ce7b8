"""Saved partitions: JSON files that list each client's samples."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.io import write_text
from .client_index import hash_manifest
from .federated import Federation
from .partitions import PARTITIONS

RowList = list[Annotated[int, Field(ge=0)]]
MANIFEST_ADVICE = "give a file that --save-partition wrote, or make a new partition"


class _Data(BaseModel, extra="forbid", strict=True):
    name: str
    n: int
    fingerprint: str


class _Client(BaseModel, extra="forbid", strict=True):
    name: str
    train: RowList
    validation: RowList
    test: RowList


class _Manifest(BaseModel, extra="forbid", strict=True):
    hash: str
    data: _Data
    partition: dict[str, Any]
    clients: list[_Client]


def find_home() -> Path:
    """Return the folder for caches and saved partitions: FEDATTUNE_HOME, or .cache/fedattune in the user's home."""
    folder = os.environ.get("FEDATTUNE_HOME")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "fedattune"


def list_partitions() -> list[str]:
    """Return the names of the partitions saved under `find_home()`."""
    return sorted(path.stem for path in (find_home() / "partitions").glob("*.json"))


def resolve_manifest_path(name_or_path: str | Path) -> Path:
    """Return the path of a manifest: as given if it ends in .json or has folders, else under `find_home()`."""
    path = Path(name_or_path)
    if path.suffix == ".json" or len(path.parts) > 1:
        return path
    return find_home() / "partitions" / f"{path.name}.json"


def check_saved_partition(name: str) -> None:
    """Refuse a name that no saved partition has; the message lists the built-in partitions, too."""
    if not resolve_manifest_path(name).exists():
        hint = did_you_mean(name, [*PARTITIONS, *list_partitions()])
        raise ConfigError(f"unknown partition {name!r}, and no such file; {hint}")


def save_manifest(federation: Federation, name_or_path: str | Path) -> Path:
    """Write the federation's manifest and return its path.

    Raises:
        DataError: another manifest has that name, or the file cannot be written.
    """
    path = resolve_manifest_path(name_or_path)
    if path.exists():
        if load_manifest(path)["hash"] == federation.digest:
            return path
        raise DataError(f"{path} already holds another partition; choose another name or delete it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(federation.iter_manifest()))
    except OSError as error:
        raise DataError(f"cannot write the partition to {path}: {error.strerror or error}") from error
    return path


def load_manifest(name_or_path: str | Path) -> dict[str, Any]:
    """Read a manifest and check its form and its hash.

    Raises:
        DataError: no such file, no valid manifest, or changed since it was saved.
    """
    path = resolve_manifest_path(name_or_path)
    try:
        return check_manifest(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise DataError(f"cannot read the partition {path}: {error.strerror or error}; {MANIFEST_ADVICE}") from error
    except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError
        raise DataError(f"{path} is not a saved partition ({error}); {MANIFEST_ADVICE}") from error


def check_manifest(manifest: Any, where: str = "the partition") -> dict[str, Any]:
    """Return the manifest after a check of its form and its hash; `where` names it in messages."""
    try:
        checked = _Manifest.model_validate(manifest).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(k) for k in first["loc"])
        raise DataError(
            f"{where} is not a saved partition ({key or 'content'}: {first['msg']}); {MANIFEST_ADVICE}"
        ) from error
    if hash_manifest(checked) != checked["hash"]:
        raise DataError(
            f"{where} has been changed since it was saved, for its hash does not match its content; {MANIFEST_ADVICE}"
        )
    return checked
