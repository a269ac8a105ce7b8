"""Store a run: metrics, mixing matrices, checkpoints, models, and client rows."""

from .checkpoint import CheckpointFolder, restore_tree
from .store import MixingLog, RoundRecord, RunStore

__all__ = [
    "CheckpointFolder",
    "MixingLog",
    "RoundRecord",
    "RunStore",
    "restore_tree",
]
