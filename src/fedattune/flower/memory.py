"""What a node remembers between messages: on its own disk, so that it survives the process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..params import Params
from ..runs.checkpoints import Checkpoints


class LostMemoryError(RunError):
    """The server takes a node to remember what it does not."""


class Memory:
    """The states of a node's clients after its last rounds of one run, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = Checkpoints(folder / "rounds", folder / "rounds" / "none")

    def recall(self, round_: int) -> Params | None:
        """The last state of a round up to this one; None before the first.

        A server that goes on from its checkpoint asks again for its last round, so a node must be able to go back.

        Raises:
            RunError: there are states, and none so early, or none that is whole.

        """
        if not self._kept.exist:
            return None
        if not self._kept.reach_back_to(round_):
            if round_ <= 0:
                return None  # the run's first round again
            raise LostMemoryError(f"the node remembers nothing so early as round {round_}")
        saved = self._kept.load(round_)
        for sentence in saved.said:
            print(f"fedattune: {sentence}", flush=True)
        return Params(saved.flat)

    def keep(self, round_: int, state: Mapping[str, Any]) -> None:
        """Remember the state after a round; later ones, of a server that went back, are forgotten."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept.forget_after(round_)
        self._kept.save(round_, state, {"round": str(round_)})
