"""The content of a run's checkpoints: its status between two rounds, and the state of its parts.

`runs/checkpoint.py` has the files. The loop decides when to save.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.io import copy_tensors, flatten_tree, load_tensors, save_tensors
from ..core.params import Params, select_prefix
from ..core.payload import Traffic
from ..runs.checkpoint import Checkpoint, restore_tree
from ..runs.context import RunContext
from ..runs.folder import RunFolder
from ..runs.rows import RowStack, load_rows
from ..runs.store import RoundRecord, RunStore
from .backends.base import CHOICE_KEY, Backend
from .clients.options import ClientLedger
from .server import Server
from .uploads.pipeline import UploadPipeline


@dataclass
class RunStatus:
    """All that a run says about itself after its last finished round.

    Attributes:
        record: the last finished round.
        traffic: bytes by kind, `up` and `down`.
        mean: mean test accuracy (or RMSE) over clients at the evaluation point, at the last evaluation.
        evaluated: round of that evaluation; 0 before the first.
        notes: sentences about interruptions of the run.
        repeats: rounds that may have been done twice with other noise, because the run was interrupted.
    """

    record: RoundRecord = field(default_factory=lambda: RoundRecord(0, 0.0, 0, 0, 0, [], []))
    traffic: dict[str, Traffic] = field(default_factory=lambda: {"up": Counter(), "down": Counter()})
    mean: float | None = None
    evaluated: int = 0
    notes: list[str] = field(default_factory=list)
    repeats: int = 0

    def dump(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in vars(self).items()}

    @classmethod
    def load(cls, meta: Mapping[str, str]) -> "RunStatus":
        values = {name: json.loads(meta[name]) for name in vars(cls())}
        values["record"] = RoundRecord(*values["record"])
        values["traffic"] = {way: Counter(parts) for way, parts in values["traffic"].items()}
        return cls(**values)


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run, whose parts the loop made; `name` is the method's, for notes."""

    folder: RunFolder
    name: str
    context: RunContext
    server: Server
    backend: Backend
    store: RunStore
    uploads: UploadPipeline
    ledger: ClientLedger

    @property
    def spends_secretly(self) -> bool:
        """True if a round that is done again costs epsilon again."""
        return (self.uploads.adds_noise or self.ledger.spends) and self.backend.traits.is_deployed

    def save(self, status: RunStatus) -> None:
        text = replace(status, notes=[*status.notes, *self.backend.notes]).dump()
        steps, step_tree = self.uploads.dump()
        text |= {"clients": json.dumps(self.context.n_clients), "upload_steps": steps}
        tree = self._state_tree() | self.ledger.state_tree() | step_tree
        self.folder.checkpoints.save(status.record.round, tree, text)

    def load(self) -> RunStatus:
        """Put the parts back to the last checkpoint, if there is one; the store may hold rounds after it."""
        status = RunStatus()
        if self.folder.checkpoints.has_any:
            saved = self.folder.checkpoints.load()
            n_before = int(saved.meta.get("clients", self.context.n_clients))
            self._load_parts(saved, n_before)
            status = RunStatus.load(saved.meta)
            # Nodes may have received models of the next round, which is done again with other noise.
            status.repeats += self.spends_secretly
            status.notes += self._describe_start(saved, status.record.round, n_before)
        self.store.forget_after(status.record.round)
        self.store.check_checkpoint(status.record)
        return status

    def _state_tree(self) -> dict[str, Any]:
        return {"server": self.server.state, "clients": self.backend.state_tree()}

    def _load_parts(self, saved: Checkpoint, n_before: int) -> None:
        """Load the state of the parts; clients beyond the first `n_before` join now."""
        if n_before < self.context.n_clients:
            self.server.load_fewer(saved.flat, n_before)
            self.backend.load_fewer(saved.flat, n_before, self.server.make_payload)
        else:
            template = self._state_tree()
            if not any(key.startswith(f"clients/{CHOICE_KEY}/") for key in saved.flat):  # of an engine without them
                template["clients"].pop(CHOICE_KEY, None)
            tree = restore_tree(template, saved.flat, rows=self.folder.rows, older=saved.older_slots)
            self.server.state = tree["server"]
            self.backend.load_state_tree(tree["clients"])
        self.ledger.load(saved.flat)
        self.uploads.load(saved.meta["upload_steps"], saved.flat)

    def _describe_start(self, saved: Checkpoint, r: int, n_before: int) -> list[str]:
        notes = [f"{one}; the run went on from round {r}" for one in saved.warnings]
        n = self.context.n_clients
        if n_before < n:
            notes.append(f"{n - n_before} of the {n} clients joined after round {r}")
        return [f"{self.name}: {note}" for note in notes]


def save_models(path: Path, models: RowStack, buffers: RowStack) -> None:
    """Write the models (N, ...) and buffers of all clients to a file, one model alone if all are the same."""
    if isinstance(models, Params) and all(v.stride(0) == 0 for v in models.values()):
        models = models.rows(slice(0, 1))
    tree = flatten_tree({"params": load_rows(models), "buffers": load_rows(buffers)})
    save_tensors(path, copy_tensors(tree), {})


def load_models(path: Path) -> tuple[Params, Params]:
    """Read the models and buffers that `save_models` wrote; one model if all are the same.

    Raises:
        RunError: the file cannot be read.
    """
    flat = load_tensors(path)[0]
    return select_prefix(flat, "params/"), select_prefix(flat, "buffers/")
