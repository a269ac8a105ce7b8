"""Define the errors that a user can fix."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class FedAttuneError(Exception):
    """Base of all errors for the user. A message says what was got, what was expected, and what to do."""


class ConfigError(FedAttuneError):
    """An unknown or impossible option, key or value."""


class DataError(FedAttuneError):
    """Missing or broken data, or an impossible split."""


class ModelError(FedAttuneError):
    """A model that cannot be built or does not fit the data."""


class RunError(FedAttuneError):
    """A run that cannot start, continue or be read."""


class DivergedError(RunError):
    """Training diverged: no client has a model of finite numbers."""


def summarize_error(error: BaseException) -> str:
    """Return an error of another library as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Suggest the nearest known name and list all names: `did you mean 'sigma'? (known: lam, sigma)`."""
    names = sorted(choices)
    listing = f"known: {', '.join(names) if names else 'none'}"
    hint = suggest_name(name, names)
    return f"{hint} ({listing})" if hint else listing


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """Suggest the nearest known name, or return an empty string."""
    matches = get_close_matches(name, sorted(choices), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""


def name_kind(value: object) -> str:
    """Say what stands in the place of something else: `an Algorithm object`, `the class EarlyStop`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind} object"


def list_some(names: Sequence[str], n: int) -> str:
    """List the first n names and count the others: `a, b and 3 more`."""
    return ", ".join(names[:n]) + (f" and {len(names) - n:,} more" if len(names) > n else "")
