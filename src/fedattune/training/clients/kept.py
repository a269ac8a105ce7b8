"""The models that early stopping keeps: for each client, the model of its best evaluated round."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.params import Params
from ...runs.context import RunContext
from ...runs.rows import RowStack, RowStorage


@dataclass
class KeptModels:
    """The kept models of the M clients of a backend, one row each; nothing if no model is to be kept.

    Attributes:
        params: parameters (M, ...).
        buffers: buffers (M, ...).
        is_kept: (M,) whether a client's model was kept; until then its row is the initial model.
    """

    params: RowStack
    buffers: RowStack
    is_kept: Tensor

    @classmethod
    def start(cls, context: RunContext, storage: RowStorage) -> "KeptModels":
        """Make room for a model of every client if the run stops early."""
        is_kept = torch.zeros(storage.n, dtype=torch.bool, device=context.device)
        if not context.stops_early:
            return cls(Params(), Params(), is_kept)
        return cls(
            storage.allocate("clients/kept/params", context.task.params),
            storage.allocate("clients/kept/buffers", context.task.buffers),
            is_kept,
        )

    @property
    def has_models(self) -> bool:
        """True if any model was kept."""
        return bool(self.is_kept.any())

    def put(self, rows: Tensor, params: Params, buffers: Params) -> None:
        """Keep models in place of some rows."""
        self.params.put_rows(rows, params)
        self.buffers.put_rows(rows, buffers)
        self.is_kept[rows] = True

    def state_tree(self) -> dict[str, Any]:
        """Return everything as a nest of dicts, for a checkpoint."""
        return {"params": self.params, "buffers": self.buffers, "is_kept": self.is_kept}

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.params, self.buffers, self.is_kept = tree["params"], tree["buffers"], tree["is_kept"]
