"""Speed and memory, always beside a floor that is measured in the same run: `python -m benchmarks`, `make bench`."""
