"""The command `fedattune`."""

from .main import main

__all__ = ["main"]
