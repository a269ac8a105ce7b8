"""Measure speed and memory, each against a floor from the same run: `python -m benchmarks`, `make bench`."""
