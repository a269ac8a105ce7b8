"""The clients of a run: their state, evaluation, acceptance and record-level privacy."""
