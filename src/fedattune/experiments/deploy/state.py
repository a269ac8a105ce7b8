"""What a node remembers between messages: on its own disk, so that it survives the process."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...core.errors import RunError
from ...core.io import write_text
from ...core.params import Params
from ...training.storage.checkpoint import CheckpointFolder


class LostStateError(RunError):
    """The server takes the node to remember what it does not."""


class StaleMessageError(RunError):
    """A message that was sent before one that was worked off already."""


class NodeState:
    """The states of a node's clients after rounds of one run, in a folder.

    The server says of which round it took the last answer of each client: from there it goes on. What it did since was
    lost on its way or refused, and is forgotten, as that of a client that drops out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # That of the server's last round, the new one, and the one before both, should the server go back a round.
        self._kept = CheckpointFolder(folder / "rounds", kept=3)

    @contextmanager
    def alone(self, number: Sequence[int]) -> Iterator[None]:
        """Work off a message with this number: after all before it, and not beside another one.

        Raises:
            StaleMessageError: one with a higher number was worked off.

        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "last-message.json"
        with FileLock(self.folder / ".lock"):
            last = json.loads(file.read_text()) if file.exists() else []
            if list(number) <= last:
                raise StaleMessageError("a message came after a later one, and is not worked off any more")
            write_text(file, json.dumps(list(number)))
            yield

    def recall(self, rounds: Sequence[int], start: Params) -> tuple[Params | None, int]:
        """The state in which each client (M,) is as after its round, and the last of these rounds that is remembered.

        `start` is that of clients before their first round. Where a state is gone, the last one before it stands in;
        None if there is none.
        """
        state, last = self._last(max(rounds))
        if state is None or last < max(rounds):
            return state, last
        for round_ in set(rounds) - {last}:
            rows = torch.tensor([row for row, its in enumerate(rounds) if its == round_])
            saved = self._kept.load_round(round_) if round_ else None
            older = Params(saved.flat) if saved else start
            state.only(older.keys() & state.keys()).put_rows(
                rows, older.only(older.keys() & state.keys()).rows(rows)
            )
        return state, last

    def _last(self, round_: int) -> tuple[Params | None, int]:
        """The state after a round, or else the last one before it, and of which round that is (0: there is none)."""
        self._kept.forget_after(round_)
        if not self._kept.has_any:
            return None, 0
        try:
            saved = self._kept.load()
        except RunError as error:
            print(f"fedattune: {error}", flush=True)
            return None, 0
        for sentence in saved.warnings:
            print(f"fedattune: {sentence}", flush=True)
        return Params(saved.flat), int(saved.meta["round"])

    def keep(self, round_: int, state: Mapping[str, Any]) -> None:
        """Remember the state after a round."""
        self._kept.save(round_, state, {"round": str(round_)})
