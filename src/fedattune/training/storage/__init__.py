"""What a run leaves behind: metrics, mixing matrices, checkpoints, models."""

from .checkpoint import CheckpointFolder, find_disk_rows, restore_tree, save_tensors
from .store import MixingLog, RoundRecord, RunStore

__all__ = [
    "CheckpointFolder",
    "MixingLog",
    "RoundRecord",
    "RunStore",
    "find_disk_rows",
    "restore_tree",
    "save_tensors",
]
