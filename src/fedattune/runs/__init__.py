"""What a run leaves behind: metrics, mixing matrices, checkpoints, models."""

from .checkpoint import disk_rows, load_tensors, restore, save_tensors
from .checkpoints import Checkpoints
from .mixing import MixingLog
from .store import RoundRecord, RunStore

__all__ = [
    "Checkpoints",
    "MixingLog",
    "RoundRecord",
    "RunStore",
    "disk_rows",
    "load_tensors",
    "restore",
    "save_tensors",
]
