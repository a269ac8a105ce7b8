"""Checks of an installation, a deployment or a node: what a check finds, and the loop that runs several of them."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import summarize_error

State = Literal["ok", "note", "broken"]
GIB = 1 << 30

MIN_FREE_BYTES = GIB
"""Free disk space below which a run may fail, in bytes."""


@dataclass(frozen=True)
class Finding:
    """One line of a check: what was found, as text and as facts for programs, and what to do, if anything.

    The state is `ok`, `note` for something that may be wanted, or `broken` for something that must work.
    """

    name: str
    state: State
    value: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Check(NamedTuple):
    """A check in a registry: its name, its function, and the advice if the function itself fails."""

    name: str
    find: Callable[[], Iterable[Finding]]
    hint: str


NODE_CHECKS: list[Callable[[Any, Path, Mapping[str, Any]], Iterable[Finding]]] = []
"""Further checks of a node's rules, with its folder and the run's configuration (may be empty); protocols add them."""


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """Run checks in their order; a check that fails is broken and never hides the others."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check.find())
        except Exception as error:  # files, networks and packages of others fail in any way
            findings.append(broken(check.name, summarize_error(error), check.hint))
    return findings


def ok(name: str, value: str, **facts: Any) -> Finding:
    """Make a finding of something that works."""
    return Finding(name, "ok", value, facts=facts)


def note(name: str, value: str, advice: str) -> Finding:
    """Make a finding of something that may be wanted."""
    return Finding(name, "note", value, advice)


def broken(name: str, value: str, advice: str = "") -> Finding:
    """Make a finding of something that must work, and does not."""
    return Finding(name, "broken", value, advice)


def find_write_error(folder: Path) -> str:
    """Try to write a file into a folder, or into the nearest parent that exists; return the reason of a failure."""
    nearest = find_nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"fedattune")
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def find_nearest(folder: Path) -> Path:
    """Return a folder, or the nearest parent that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def check_free_space(name: str, folder: Path, where: str, state: State, advice: str) -> Finding:
    """Check the free disk space of a folder; `where` follows "free", and `state` is for too little space."""
    free = shutil.disk_usage(find_nearest(folder)).free
    is_full = free < MIN_FREE_BYTES
    text = f"{'only ' if is_full else ''}{free / GIB:.1f} GiB free{where}"
    return Finding(name, state if is_full else "ok", text, advice if is_full else "", {"free_bytes": free})
