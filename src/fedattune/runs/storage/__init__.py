"""Store a run: metrics, mixing matrices, checkpoints, models, and client rows."""
