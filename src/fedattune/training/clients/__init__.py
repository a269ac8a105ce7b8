"""The clients of a run: their state, evaluation, and what options ask of them."""
