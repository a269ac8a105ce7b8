"""Look at runs while they train, from another terminal: a table that is renewed, and the report."""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RunError
from ..text import make_console
from .view_options import Watch, asked

if TYPE_CHECKING:
    from rich.console import Console

    from ..reading import Runs
    from ..watching import Line, Look

REPORT_SHARE = 0.1
"""Share of the time that may go into renewing the report: what trains needs the cores."""


def watch(space: Namespace, problems: Sequence[str]) -> int:
    """Show where each run stands, until all have come to their end or the user leaves; then table and verdict.

    On a terminal it is a table, renewed in place; elsewhere a line for each run that has changed. A round is seen when
    it is committed, which happens about every two seconds, or after every round where rounds take longer.

    Returns 0, 1 if a run failed, or 130 if the user left.

    Raises:
        ConfigError, RunError: options that cannot be, or a folder that holds no runs.

    """
    from ..output import check_files
    from ..reading import files_of
    from ..watching import Look
    from .command import FAILED, INTERRUPTED
    from .watch_table import show, tell

    options = asked(Watch, space, problems)
    run: Path = space.run
    look = Look(run)
    check_files({"--out": options.out}, files_of([run]))
    report, console = _Report(run, options.out), make_console()
    try:
        if options.once:
            lines = look.lines()
            show(lines, run, console)
            report.renew(lines)
        elif console.is_terminal and not console.is_dumb_terminal:
            lines = _live(look, options.every, report, console)
        else:
            before: list[Line] = []
            while not _over(lines := look.lines()):
                tell(lines, before, console)
                report.renew(lines)
                before = lines
                time.sleep(options.every)
            tell(lines, before, console)
    except KeyboardInterrupt:
        print("fedattune: left; the runs go on", file=sys.stderr)
        return INTERRUPTED
    if _over(lines):
        _conclude(run, report, console)
    if report.written:
        console.print(f"The report is {options.out}")
    return FAILED if any(line.state == "failed" for line in lines) else 0


def _over(lines: "Sequence[Line]") -> bool:
    return all(line.state in ("finished", "failed") for line in lines)


def _live(look: "Look", every: float, report: "_Report", console: "Console") -> "list[Line]":
    """Renew the table in place until all runs are over, and return where they stand then."""
    from rich.live import Live

    from .watch_table import view

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            lines = look.lines()
            live.update(view(lines, look.path, console), refresh=True)
            if _over(lines):
                return lines
            report.renew(lines)
            time.sleep(every)


def _conclude(run: Path, report: "_Report", console: "Console") -> None:
    """Print what `compare` prints at its end, and write the report a last time."""
    from ..compare import by_algorithm, print_table, rows
    from ..reading import read_runs
    from ..report.findings import judged

    found = read_runs([run], running=True)
    report.write(found)
    if found.results:
        print_table(rows(found.results, found.rounds_to), console, found.rounds_to)
    for one in found.failed:
        console.print(f"note: {one}")
    if len(by_algorithm(found.results)) > 1:
        console.print(judged(found).text, style="bold")


class _Report:
    """The report, written again when something is new and the last time is long enough ago."""

    def __init__(self, run: Path, out: Path | None) -> None:
        self.run, self.out = run, out
        self.written = False
        self._next = 0.0
        self._shown: list[tuple[int, bool]] = []

    def renew(self, lines: "Sequence[Line]") -> None:
        """Write it where it is asked for, due, and not the same as before."""
        from ..reading import read_runs

        shown = [(line.round, line.state == "finished") for line in lines]
        begun = time.monotonic()
        if self.out is None or shown == self._shown or not any(r for r, _ in shown) or begun < self._next:
            return
        try:
            self.write(read_runs([self.run], running=True))
        except RunError:
            if _over(lines):
                raise
            return  # a run was being made or resumed at this moment: the next look will do
        self._shown, self._next = shown, time.monotonic() + (time.monotonic() - begun) / REPORT_SHARE

    def write(self, found: "Runs") -> None:
        """Write it where it is asked for and something is there to report."""
        from ..report import write_report

        if self.out is not None and found.results:
            write_report(self.out, found)
            self.written = True
