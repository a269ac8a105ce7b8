"""Files of a node: its configuration, the folder of its state, its errors, and the run that is current."""

import json
import logging
import os
import tomllib
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, FedAttuneError
from ...core.io import write_text
from ..logs import log_node

ERRORS, OLD_ERRORS = "error.log", "error.old.log"

KEPT_CHARS = 200_000
"""Length of the older entries that `error.log` keeps, so that a lasting error does not fill the disk."""


def read_node_file(file: Path) -> dict[str, Any]:
    """Read the configuration of a node.

    Args:
        file: the node's `nodes/N.toml`.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.

    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the node's configuration {file}: {error.strerror or error}; name a file such as nodes/0.toml"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}; correct that line") from error


def find_base(file: Path) -> Path:
    """Return the folder to which the paths in a node's configuration are relative.

    Args:
        file: the node's configuration. The scripts of a deployment run in the folder above `nodes`.

    """
    inside = file.absolute().parent
    return inside.parent if inside.name == "nodes" else Path()


def find_state(node: Path | None) -> Path:
    """Find the folder of a node's state.

    Args:
        node: that folder, or the node's configuration; None for FEDATTUNE_STATE or else `state`, like the node itself.

    Raises:
        ConfigError: the configuration cannot be read.

    """
    if node is None:
        return Path(os.environ.get("FEDATTUNE_STATE", "state"))
    if node.is_dir():
        return node
    config, base = read_node_file(node), find_base(node)
    if state := config.get("state"):
        return base / str(state)
    return base / "state" / f"node-{node.stem}"


def report_error(folder: Path, error: Exception, head: Mapping[str, Any]) -> None:
    """Print an error, and add it to the node's `error.log` with its date.

    Args:
        folder: the folder of the node's state.
        error: the error.
        head: head of the message that the node could not answer.

    """
    text = "".join(traceback.format_exception(error))
    log_node(
        str(error if isinstance(error, FedAttuneError) else text),
        without_data=f"the node could not answer ({type(error).__name__}); its {ERRORS} says why",
        level=logging.ERROR,
        head=head,
    )
    parts = [
        f"{key} {str(head[key])[:60].encode('unicode_escape').decode()}"  # a line break could forge an entry
        for key in ("kind", "algorithm", "seed", "round")
        if key in head
    ]
    entry = f"{datetime.now(UTC).isoformat(timespec='seconds')} message: {', '.join(parts)}\n{text}\n"
    with suppress(OSError):  # a full disk must not replace the error itself; the node's log has it already
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / ERRORS
        older = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        write_text(file, older[-KEPT_CHARS:] + entry)


def retire_errors(folder: Path) -> None:
    """Rename `error.log` to `error.old.log` after a success, so that an `error.log` always says what fails now."""
    with suppress(FileNotFoundError):
        (folder / ERRORS).replace(folder / OLD_ERRORS)


def mark_current(folder: Path, token: str) -> None:
    """Point to the folder of the run that the node takes part in: `current`, a link.

    Where the system allows no links, the file `current.json` names the folder.

    Args:
        folder: the folder of the node's state.
        token: name of the run's folder in it.

    """
    link = folder / "current"
    if link.is_symlink() and os.readlink(link) == token:
        return
    new = folder / f".current.{os.getpid()}"
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(token, target_is_directory=True)
        new.replace(link)
    except OSError:
        new.unlink(missing_ok=True)
        write_text(folder / "current.json", json.dumps({"folder": token}) + "\n")
