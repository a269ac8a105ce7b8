"""Files and results of a run: its folder, scores, models and result."""
