"""Look at runs while they train, from another terminal: a table that is renewed, and the report.

How `fedattune watch` shows runs: a table that fits the terminal, or plain lines.
"""

import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.tables import format_bytes, make_console, make_table, measure_width, print_whole
from ..core.errors import RunError
from .options import WatchOptions, parse_options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from ..analysis.load import Runs
    from ..analysis.monitor import RunMonitor, RunState, RunStatus

REPORT_TIME_SHARE = 0.1
"""Share of the time that may go into renewing the report: what trains needs the cores."""


def watch(space: Namespace, problems: Sequence[str]) -> int:
    """Show where each run stands, until all have come to their end or the user leaves; then table and verdict.

    On a terminal it is a table, renewed in place; elsewhere a line for each run that has changed. A round is seen when
    it is committed, which happens about every two seconds, or after every round where rounds take longer.

    Returns 0, 1 if a run failed, or 130 if the user left.

    Raises:
        ConfigError, RunError: options that cannot be, or a folder that holds no runs.

    """
    from ..analysis.load import list_run_files
    from ..analysis.monitor import RunMonitor
    from ..experiments.output import check_output_files
    from .main import FAILED, INTERRUPTED
    # DROPPED IMPORT

    options = parse_options(WatchOptions, space, problems)
    run: Path = space.run
    look = RunMonitor(run)
    check_output_files({"--out": options.out}, list_run_files([run]))
    report, console = _LiveReport(run, options.out), make_console()
    try:
        if options.once:
            lines = look.lines()
            print_status(lines, run, console)
            report.renew(lines)
        elif console.is_terminal and not console.is_dumb_terminal:
            lines = _show_live(look, options.every, report, console)
        else:
            before: list[RunStatus] = []
            while not _have_ended(lines := look.lines()):
                print_changes(lines, before, console)
                report.renew(lines)
                before = lines
                time.sleep(options.every)
            print_changes(lines, before, console)
    except KeyboardInterrupt:
        print("fedattune: left; the runs go on", file=sys.stderr)
        return INTERRUPTED
    if _have_ended(lines):
        _print_conclusion(run, report, console)
    if report.written:
        console.print(f"The report is {options.out}")
    return FAILED if any(line.state == "failed" for line in lines) else 0


def _have_ended(lines: "Sequence[RunStatus]") -> bool:
    return all(line.state in ("finished", "failed") for line in lines)


def _show_live(
    look: "RunMonitor", every: float, report: "_LiveReport", console: "Console"
) -> "list[RunStatus]":
    """Renew the table in place until all runs are over, and return where they stand then."""
    from rich.live import Live

    # DROPPED IMPORT

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            lines = look.lines()
            live.update(fit_terminal(lines, look.path, console), refresh=True)
            if _have_ended(lines):
                return lines
            report.renew(lines)
            time.sleep(every)


def _print_conclusion(run: Path, report: "_LiveReport", console: "Console") -> None:
    """Print what `compare` prints at its end, and write the report a last time."""
    from ..analysis.compare import build_rows, group_by_algorithm
    from ..analysis.load import read_runs
    from ..analysis.tables import print_methods

    found = read_runs([run], running=True)
    report.write(found)
    if found.results:
        print_methods(build_rows(found.results, found.rounds_to), console, found.rounds_to)
    for one in found.failed:
        console.print(f"note: {one}")
    if len(group_by_algorithm(found.results)) > 1:
        console.print(found.verdict.text, style="bold")


class _LiveReport:
    """The report, written again when something is new and the last time is long enough ago."""

    def __init__(self, run: Path, out: Path | None) -> None:
        self.run, self.out = run, out
        self.written = False
        self._next = 0.0
        self._shown: list[tuple[int, bool]] = []

    def renew(self, lines: "Sequence[RunStatus]") -> None:
        """Write it where it is asked for, due, and not the same as before."""
        from ..analysis.load import read_runs

        shown = [(line.round, line.state == "finished") for line in lines]
        begun = time.monotonic()
        if self.out is None or shown == self._shown or not any(r for r, _ in shown) or begun < self._next:
            return
        try:
            self.write(read_runs([self.run], running=True))
        except RunError:
            if _have_ended(lines):
                raise
            return  # a run was being made or resumed at this moment: the next look will do
        self._shown, self._next = shown, time.monotonic() + (time.monotonic() - begun) / REPORT_TIME_SHARE

    def write(self, found: "Runs") -> None:
        """Write it where it is asked for and something is there to report."""
        from ..analysis.report import write_report

        if self.out is not None and found.results:
            write_report(self.out, found)
            self.written = True


StatusFormatter = Callable[["RunStatus"], str]


STATUS_COLUMNS: dict[str, StatusFormatter] = {
    "method": lambda line: line.method,
    "seed": lambda line: str(line.seed),
    "state": lambda line: line.state,
    "round": lambda line: f"{line.round} of {line.rounds}" if line.rounds else "-",
    "mean %": lambda line: _format_accuracy(line.accuracy),
    "- local": lambda line: "-" if line.gain is None else f"{100 * line.gain:+.2f}",
    "worst 10%": lambda line: _format_accuracy(line.worst10),
    "bytes": lambda line: format_bytes(line.bytes) if line.round else "-",
    "time": lambda line: _format_duration(line.seconds) if line.round else "-",
    "left": lambda line: "-" if line.left is None else _format_duration(line.left),
    "absent": lambda line: f"{line.absent:,}",
    "diverged": lambda line: f"{line.diverged:,}",
}


DROPPABLE_COLUMNS = ("bytes", "time", "absent", "worst 10%", "diverged", "left", "- local")
"""Columns that a narrow terminal goes without, the first ones first."""


STATE_STYLES = {"running": "bold", "failed": "red", "stopped?": "yellow", "waiting": "dim"}


STATUS_LEGEND = {
    "mean %": "mean: test accuracy over clients at the last evaluation",
    "worst 10%": "worst 10%: that of the worst tenth of them",
    "- local": "- local: points above local in the same round",
    "left": "left: about how long",
    "absent": "absent: times that a client did not answer",
    "diverged": "diverged: times that a client's training was not finite",
}


STATE_ORDER: "tuple[RunState, ...]" = ("running", "stopped?", "failed", "finished", "waiting")
"""Whom a low terminal shows, these first."""


def _format_accuracy(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _format_duration(seconds: float) -> str:
    """Seconds below a minute, then 12:34, then 5:12:34."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _choose_status_columns(lines: "Sequence[RunStatus]") -> dict[str, StatusFormatter]:
    """The columns that say something here."""
    out = dict(STATUS_COLUMNS)
    if len({line.seed for line in lines}) == 1:
        del out["seed"]
    for title, counts in (
        ("- local", [line.gain is not None for line in lines]),
        ("absent", [line.absent for line in lines]),
        ("diverged", [line.diverged for line in lines]),
    ):
        if not any(counts):
            del out[title]
    return out


def _make_status_table(lines: "Sequence[RunStatus]", cells: Mapping[str, StatusFormatter]) -> "Table":
    table = make_table(*cells, left=("method", "state"))
    for line in lines:
        table.add_row(*(cell(line) for cell in cells.values()), style=STATE_STYLES.get(line.state))
    return table


def _join_legend(cells: Mapping[str, StatusFormatter]) -> str:
    return "; ".join(text for title, text in STATUS_LEGEND.items() if title in cells)


def _write_notes(lines: "Sequence[RunStatus]", run: Path) -> list[str]:
    said = [line.why for line in lines if line.why]
    quiet = [line.quiet for line in lines if line.state == "stopped?"]
    if quiet and not any(line.state == "running" for line in lines):
        said.append(
            f"stopped?: nothing new for {_format_duration(min(quiet))}; if nothing trains there any more, go on with: "
            f"fedattune {_read_command(run)} --resume {shlex.quote(str(run))}"
        )
    if all(line.state == "waiting" or not line.round for line in lines):
        said.append("No round is finished yet.")
    return said


def _read_command(run: Path) -> str:
    """The command that runs in a folder are of."""
    file = run / "command.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else "compare"


def fit_terminal(lines: "Sequence[RunStatus]", run: Path, console: "Console") -> "RenderableType":
    """What fits the terminal: columns that matter less are left out, and then lines."""
    from rich.console import Group
    from rich.text import Text

    cells = _choose_status_columns(lines)
    for title in DROPPABLE_COLUMNS:
        if measure_width(_make_status_table(lines, cells), console) <= console.width:
            break
        cells.pop(title, None)
    texts = [
        Text(note, style="dim")
        for note in [*_write_notes(lines, run), f"{_join_legend(cells)}. Ctrl-C leaves."]
    ]

    def rows() -> int:
        # Above and below the table are lines too: an empty one, titles, a rule, another empty one.
        return console.height - 5 - sum(len(text.wrap(console, console.width)) for text in texts)

    if rows() < len(lines):
        del texts[-1]
    room = rows()
    shown, hidden = list(lines), ""
    if len(lines) > max(room, 1):
        kept = sorted(range(len(lines)), key=lambda i: STATE_ORDER.index(lines[i].state))[: max(room - 1, 1)]
        shown = [lines[i] for i in sorted(kept)]
        rest = [line.state for i, line in enumerate(lines) if i not in kept]
        hidden = "and " + ", ".join(f"{rest.count(state)} {state}" for state in STATE_ORDER if state in rest)
    return Group(_make_status_table(shown, cells), *([Text(hidden, style="dim")] if hidden else []), *texts)


def print_status(lines: "Sequence[RunStatus]", run: Path, console: "Console") -> None:
    """Print all there is, once."""
    print_whole(_make_status_table(lines, _choose_status_columns(lines)), console)
    for note in [*_write_notes(lines, run), _join_legend(_choose_status_columns(lines))]:
        console.print(note, style="dim")


def print_changes(lines: "Sequence[RunStatus]", before: "Sequence[RunStatus]", console: "Console") -> None:
    """Print a plain line for every run that has changed."""
    known = {(line.method, line.seed): (line.state, line.round) for line in before}
    several = len({line.seed for line in lines}) > 1
    for line in lines:
        if known.get((line.method, line.seed)) == (line.state, line.round):
            continue
        if line.state == "waiting" and before:
            continue
        console.print(_describe_status(line, several))


def _describe_status(line: "RunStatus", several: bool) -> str:
    """One run in plain words: `fedavg (seed 1): running, round 3 of 9, mean 81.20%, ...`."""
    said: list[str] = [line.state]
    if line.round:
        said.append(f"round {line.round} of {line.rounds}")
    if line.accuracy is not None:
        said.append(f"mean {100 * line.accuracy:.2f}%")
    if line.gain is not None:
        said.append(f"{100 * line.gain:+.2f} points to local")
    if line.worst10 is not None:
        said.append(f"worst 10% {100 * line.worst10:.2f}%")
    if line.round:
        said += [format_bytes(line.bytes), f"{_format_duration(line.seconds)} so far"]
    if line.left is not None and line.left >= 1:
        said.append(f"about {_format_duration(line.left)} left")
    said += [
        f"{count:,} {what}" for count, what in ((line.absent, "absent"), (line.diverged, "diverged")) if count
    ]
    seed = f" (seed {line.seed})" if several else ""
    return f"{line.method}{seed}: {', '.join(said)}" + (f"; {line.why}" if line.why else "")
