"""Files of a node: its configuration, the states of its clients, its errors, and the run that is current."""

import json
import logging
import os
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...core.errors import ConfigError, FedAttuneError, RunError
from ...core.io import write_text
from ...core.params import Params
from ...runs.checkpoint import CheckpointFolder
from ..logs import log_node

ERRORS, OLD_ERRORS = "error.log", "error.old.log"

KEPT_CHARS = 200_000
"""Length of the older entries that `error.log` keeps, so that a lasting error does not fill the disk."""


def read_node_file(file: Path) -> dict[str, Any]:
    """Read the configuration of a node."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the node's configuration {file}: {error.strerror or error}; name a file such as nodes/0.toml"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}; correct that line") from error


def find_base(file: Path) -> Path:
    """Return the folder to which the paths in a node's configuration are relative: scripts run above `nodes`."""
    inside = file.absolute().parent
    return inside.parent if inside.name == "nodes" else Path()


def find_state(node: Path | None) -> Path:
    """Find the folder of a node's state.

    Args:
        node: that folder, or the node's configuration; None for FEDATTUNE_STATE or else `state`, like the node itself.
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
    """Print an error, and add it to the node's `error.log` with its date."""
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


ROUNDS_KEPT = 3
"""The server's last round, the new round, and the round before both, in case the server goes back a round."""


class LostStateError(RunError):
    """The node lost a state that the server expects it to have."""


class StaleMessageError(RunError):
    """A message was sent before another one that the node has already handled."""


class NodeState:
    """The states of a node's clients after the last rounds of one run, in a folder.

    For each client, the server names the round whose reply it last accepted; the client continues from there. Later
    work was lost on its way or rejected, so the node forgets it, like the work of a client that drops out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoints = CheckpointFolder(folder / "rounds", n_kept=ROUNDS_KEPT)

    @contextmanager
    def lock(self, number: Sequence[int]) -> Iterator[None]:
        """Handle the message with this number: after all earlier messages, and one message at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "last-message.json"
        with FileLock(self.folder / ".lock"):
            last = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
            if list(number) <= last:
                raise StaleMessageError("a message came after a later one, and is not handled any more")
            write_text(file, json.dumps(list(number)))
            yield

    def load(self, rounds: Sequence[int], start: Params) -> tuple[Params | None, int]:
        """Load the state of every client after its round (M,), 0 for none; `start` is the state before the first.

        Returns:
            The state, and the last of the rounds that the node still has. An older state replaces a lost one; None
            and 0 if there is no state at all.
        """
        # A client whose uploads are rejected continues from an ever older round.
        self._checkpoints = replace(self._checkpoints, needed=frozenset(rounds))
        self._checkpoints.forget_after(max(rounds))
        try:
            newest = self._checkpoints.load() if self._checkpoints.has_any else None
        except RunError as error:
            log_node(str(error))
            newest = None
        if newest is None:
            return None, 0
        for sentence in newest.warnings:
            log_node(sentence)
        state, last = Params(newest.flat), int(newest.meta["round"])
        if last < max(rounds):
            return state, last
        for round_ in set(rounds) - {last}:
            rows = torch.tensor([row for row, other in enumerate(rounds) if other == round_])
            saved = self._checkpoints.load_round(round_) if round_ else None
            older = Params(saved.flat) if saved else start
            shared = older.keys() & state.keys()
            state.only(shared).put_rows(rows, older.only(shared).rows(rows))
        return state, last

    def save(self, round_: int, state: Mapping[str, Any]) -> None:
        self._checkpoints.save(round_, state, {"round": str(round_)})
