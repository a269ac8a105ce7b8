"""Backends: run clients in this process, on remote workers, or on Ray."""
