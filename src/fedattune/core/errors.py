"""Errors that a user can do something about.

FedAttuneError
├── ConfigError   an option, key or value that cannot be
├── DataError     data that is missing, broken or cannot be split as asked
├── ModelError    a model that cannot be built or does not fit the data
└── RunError      a run that cannot start, go on or be read
    └── DivergedError   training that left the finite numbers on every client
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FedAttuneError(Exception):
    """Base of all errors whose message is written for the user: what was got, expected, and what to do."""


class ConfigError(FedAttuneError):
    """An option, key or value that cannot be."""


class DataError(FedAttuneError):
    """Data that is missing, broken, or cannot be split as asked."""


class ModelError(FedAttuneError):
    """A model that cannot be built or does not fit the data."""


class RunError(FedAttuneError):
    """A run that cannot start, go on, or be read."""


class DivergedError(RunError):
    """Training left the finite numbers on every client."""


def summarize_error(error: BaseException) -> str:
    """An error of another library in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest, and list them all: `did you mean 'sigma'? (known: lam, sigma)`."""
    names = sorted(known)
    known_names = f"known: {', '.join(names) if names else 'none'}"
    hint = suggest_name(name, names)
    return f"{hint} ({known_names})" if hint else known_names


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest, if any is, where all would be too many to list."""
    found = get_close_matches(name, sorted(known), n=1)
    return f"did you mean {found[0]!r}?" if found else ""
