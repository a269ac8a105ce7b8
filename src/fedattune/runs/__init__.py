"""What a run leaves: its folder, scores, models and result."""
