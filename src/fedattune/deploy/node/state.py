"""The state of a node's clients between messages, on the node's disk: it survives the node's process."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...core.errors import RunError
from ...core.io import write_text
from ...core.params import Params
from ...runs.checkpoint import CheckpointFolder
from ..logs import log_node

ROUNDS_KEPT = 3
"""The server's last round, the new round, and the round before both, in case the server goes back a round."""


class LostStateError(RunError):
    """The node lost a state that the server expects it to have."""


class StaleMessageError(RunError):
    """A message was sent before another one that the node has already handled."""


class NodeState:
    """The states of a node's clients after the last rounds of one run, in a folder.

    For each client, the server names the round whose reply it last accepted; the client continues from there. Later
    work was lost on its way or refused, so the node forgets it, like the work of a client that drops out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoints = CheckpointFolder(folder / "rounds", n_kept=ROUNDS_KEPT)

    @contextmanager
    def lock(self, number: Sequence[int]) -> Iterator[None]:
        """Handle the message with this number: after all earlier messages, and one message at a time.

        Raises:
            StaleMessageError: a message with a higher number was handled before.

        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "last-message.json"
        with FileLock(self.folder / ".lock"):
            last = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
            if list(number) <= last:
                raise StaleMessageError("a message came after a later one, and is not handled any more")
            write_text(file, json.dumps(list(number)))
            yield

    def load(self, rounds: Sequence[int], start: Params) -> tuple[Params | None, int]:
        """Load the state of every client after its round.

        Args:
            rounds: one round per client, (M,); 0 for a client before its first round.
            start: state of the clients before their first round, (M, ...).

        Returns:
            The state, and the last of the rounds that the node still has. An older state replaces a lost one; None
            and 0 if there is no state at all.

        """
        # A client whose uploads are refused continues from an ever older round.
        self._checkpoints = replace(self._checkpoints, needed=frozenset(rounds))
        state, last = self._load_last(max(rounds))
        if state is None or last < max(rounds):
            return state, last
        for round_ in set(rounds) - {last}:
            rows = torch.tensor([row for row, other in enumerate(rounds) if other == round_])
            saved = self._checkpoints.load_round(round_) if round_ else None
            older = Params(saved.flat) if saved else start
            shared = older.keys() & state.keys()
            state.only(shared).put_rows(rows, older.only(shared).rows(rows))
        return state, last

    def _load_last(self, round_: int) -> tuple[Params | None, int]:
        """Load the state after a round, or else the newest older one; return it with its round."""
        self._checkpoints.forget_after(round_)
        if not self._checkpoints.has_any:
            return None, 0
        try:
            saved = self._checkpoints.load()
        except RunError as error:
            log_node(str(error))
            return None, 0
        for sentence in saved.warnings:
            log_node(sentence)
        return Params(saved.flat), int(saved.meta["round"])

    def save(self, round_: int, state: Mapping[str, Any]) -> None:
        """Save the state after a round."""
        self._checkpoints.save(round_, state, {"round": str(round_)})
