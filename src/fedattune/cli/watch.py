"""`fedattune watch`: a table of runs while they train, from another terminal, and the report."""

import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.output.tables import fill_table, format_bytes, format_points, make_console, measure_width, print_whole
from ..core.errors import RunError
from ..core.metrics import METRICS, format_number
from ..core.own_code import format_allow_code, list_references
from .main import FAILED, INTERRUPTED, print_message
from .options import WatchOptions, parse_options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from ..analysis.monitor import NodeStatus, RunState, RunStatus

REPORT_TIME_SHARE = 0.1
"""Share of the time that may go into renewing the report: training needs the cores."""


def watch(space: Namespace, problems: Sequence[str]) -> int:
    """Show the status of each run until all have ended or the user leaves; then print table and verdict.

    On a terminal, a table is renewed in place; elsewhere, each run that has changed gets a line. Return 0, 1 if a run
    failed, or 130 if the user left.
    """
    from rich.live import Live

    from ..analysis.compare import group_by_algorithm
    from ..analysis.load import is_growing, read_runs
    from ..analysis.monitor import FIRST_ROUND_S, read_statuses
    from ..analysis.output.tables import print_methods
    from ..experiments.output import check_output_files

    options = parse_options(WatchOptions, space, problems)
    run: Path = space.run
    statuses: list[RunStatus] = read_statuses(run)
    before: list[RunStatus] = []
    check_output_files({"--out": options.out}, {}, {"--out": (".html",)})
    report, console = _LiveReport(run, options.out), make_console()
    is_live = console.is_terminal and not console.is_dumb_terminal and not options.once
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if is_live else None
    try:
        with live or nullcontext():
            while True:
                if live:
                    live.update(fit_terminal(statuses, run, console), refresh=True)
                elif options.once:
                    print_status(statuses, run, console)
                else:
                    print_changes(statuses, before, console)
                is_quiet = all(status.quiet > FIRST_ROUND_S for status in statuses)  # a comparison that was killed
                has_ended = all(status.has_ended for status in statuses) and (is_quiet or not is_growing(run))
                if not has_ended:
                    report.renew(statuses)
                if has_ended or options.once:
                    break
                time.sleep(options.every)
                statuses, before = read_statuses(run), statuses
    except KeyboardInterrupt:
        print_message("left; the runs go on")
        return INTERRUPTED
    if has_ended:  # print what `compare` prints at its end, and write the report a last time
        runs = read_runs([run], running=True)
        report.write()
        if runs.results:
            print_methods(runs.rows, console, runs.rounds_to)
        for failure in runs.failed:
            console.print(f"note: {failure}")
        if len(group_by_algorithm(runs.results)) > 1:
            console.print(runs.verdict.text, style="bold")
    if report.is_written:
        console.print(f"The report is {options.out}")
    return FAILED if any(status.state == "failed" for status in statuses) else 0


class _LiveReport:
    """The report, written again when something is new and the last time is long enough ago."""

    def __init__(self, run: Path, out: Path | None) -> None:
        self.run, self.out = run, out
        self.is_written = False
        self._next = 0.0
        self._last_states: list[tuple[int, RunState]] = []

    def renew(self, statuses: "Sequence[RunStatus]") -> None:
        """Write the report if it is due and something is new."""
        states = [(status.round, status.state) for status in statuses]
        begun = time.monotonic()
        if states == self._last_states or begun < self._next:
            return
        try:
            self.write()
        except RunError:  # a run was being made or resumed at this moment: the next time will do
            return
        self._last_states = states
        self._next = time.monotonic() + (time.monotonic() - begun) / REPORT_TIME_SHARE

    def write(self) -> None:
        """Write the report if a file was given and a round is finished."""
        from ..analysis.load import read_runs
        from ..analysis.output.report import write_report

        if self.out is not None and (runs := read_runs([self.run], running=True)).results:
            write_report(self.out, runs)
            self.is_written = True


StatusColumns = Mapping[str, Callable[["RunStatus"], str]]
STATUS_COLUMNS: StatusColumns = {
    "method": lambda status: status.method,
    "seed": lambda status: str(status.seed),
    "split": lambda status: str(status.split),
    "state": lambda status: status.state,
    "round": lambda status: f"{status.round} of {status.rounds}" if status.rounds else "-",
    "mean": lambda status: _format_mean(status, status.mean),
    "- local": lambda status: _format_mean(status, status.gain, "+"),
    "worst 10%": lambda status: _format_mean(status, status.worst10),
    "bytes": lambda status: format_bytes(status.bytes) if status.round else "-",
    "time": lambda status: _format_duration(status.seconds if status.round else None),
    "left": lambda status: _format_duration(status.seconds_left),
    "absent": lambda status: f"{status.absent:,}",
    "diverged": lambda status: f"{status.diverged:,}",
}
OPTIONAL_COLUMNS = ("- local", "absent", "diverged")
"""Columns that are shown only if a run has such a number."""
DROPPABLE_COLUMNS = ("bytes", "time", "absent", "worst 10%", "diverged", "left", "- local")
"""Columns that a narrow terminal goes without, the first ones first."""
STATE_STYLES = {"running": "bold", "failed": "red", "stopped?": "yellow", "waiting": "dim"}
STATUS_LEGEND = {
    "mean": "mean: test accuracy in %, or RMSE, over clients at the last evaluation",
    "worst 10%": "worst 10%: the mean over the worst tenth of them",
    "- local": "- local: better than local by, in the same round",
    "left": "left: about how long",
    "absent": "absent: times that a client did not answer",
    "diverged": "diverged: times that a client's training was not finite",
}
STATE_ORDER: "tuple[RunState, ...]" = ("running", "stopped?", "failed", "finished", "waiting")
"""Runs that a low terminal shows, the first ones first."""


def _format_mean(status: "RunStatus", value: float | None, sign: str = "") -> str:
    """Format an accuracy in percent without the unit, or an RMSE; a dash for None."""
    if value is None or METRICS[status.metric].is_percent:
        return format_points(value, sign=sign)
    return format_number(value, sign=sign)


def _format_duration(seconds: float | None) -> str:
    """Format seconds below a minute, then 12:34, then 5:12:34; a dash for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _choose_columns(statuses: "Sequence[RunStatus]") -> dict[str, Callable[["RunStatus"], str]]:
    silent = {title for title in OPTIONAL_COLUMNS if {STATUS_COLUMNS[title](one) for one in statuses} <= {"-", "0"}}
    silent |= {title for title in ("seed", "split") if len({getattr(status, title) for status in statuses}) == 1}
    return {title: cell for title, cell in STATUS_COLUMNS.items() if title not in silent}


def _make_table(statuses: "Sequence[RunStatus]", columns: StatusColumns) -> "Table":
    return fill_table(statuses, columns, ("method", "state"), lambda status: STATE_STYLES.get(status.state))


def _write_notes(statuses: "Sequence[RunStatus]", run: Path) -> list[str]:
    from ..analysis.folder import COMMAND_FILE
    from ..analysis.load import read_experiment
    from ..analysis.monitor import is_deployment, read_nodes

    notes = [status.failure for status in statuses if status.failure]
    if any(status.state == "running" for status in statuses):  # a killed server leaves an old file
        notes += _describe_nodes(read_nodes(run))
    quiet = [status.quiet for status in statuses if status.state == "stopped?"]
    if quiet and not any(status.state == "running" for status in statuses):
        file = run / COMMAND_FILE
        command = file.read_text(encoding="utf-8").strip() if file.is_file() else "compare"
        code = format_allow_code(list_references(read_experiment(run)))
        resume = f"fedattune {command} --resume {shlex.quote(str(run))} {code}".rstrip()
        if is_deployment(run):
            resume = "./run.sh in the folder of the deployment"
        notes.append(
            f"stopped?: nothing new for {_format_duration(min(quiet))}; if nothing trains there any more, resume with: "
            f"{resume}"
        )
    if not any(status.round for status in statuses):
        notes.append("No round is finished yet.")
    return notes


def _describe_nodes(nodes: "Sequence[NodeStatus]") -> list[str]:
    """Describe the nodes of a deployment in one sentence, or in none if there are no nodes."""
    if not nodes:
        return []
    faults: dict[str, list[str]] = {}
    for node in nodes:
        fault = node.fault if node.is_online or node.fault == "removed" else "offline"
        if fault:
            faults.setdefault(fault, []).append(node.name)
    parts = [f"{sum(node.is_online for node in nodes)} of {len(nodes)} online"]
    parts += [f"{fault}: {', '.join(names)}" for fault, names in sorted(faults.items())]
    return [f"nodes: {'; '.join(parts)}"]


def _join_legend(columns: StatusColumns) -> str:
    return "; ".join(text for title, text in STATUS_LEGEND.items() if title in columns)


def fit_terminal(statuses: "Sequence[RunStatus]", run: Path, console: "Console") -> "RenderableType":
    """Fit the table to the terminal: leave out columns that matter less, and then runs."""
    from rich.console import Group
    from rich.text import Text

    columns = _choose_columns(statuses)
    for title in DROPPABLE_COLUMNS:
        if measure_width(_make_table(statuses, columns), console) <= console.width:
            break
        columns.pop(title, None)
    notes = [Text(note, style="dim") for note in _write_notes(statuses, run)]
    legend = Text(f"{_join_legend(columns)}. Ctrl-C leaves.", style="dim")

    def count_rows(texts: list[Text]) -> int:
        # Above and below the table are lines too: an empty one, titles, a rule, another empty one.
        return console.height - 5 - sum(len(text.wrap(console, console.width)) for text in texts)

    texts = [*notes, legend] if count_rows([*notes, legend]) >= len(statuses) else notes
    n_rows = max(count_rows(texts), 1)
    visible_statuses = list(statuses)
    if len(statuses) > n_rows:
        by_state = sorted(range(len(statuses)), key=lambda i: STATE_ORDER.index(statuses[i].state))
        positions = by_state[: max(n_rows - 1, 1)]
        visible_statuses = [statuses[i] for i in sorted(positions)]
        states = [status.state for i, status in enumerate(statuses) if i not in positions]
        hidden_states = ", ".join(f"{states.count(state)} {state}" for state in STATE_ORDER if state in states)
        texts = [Text(f"and {hidden_states}", style="dim"), *texts]
    return Group(_make_table(visible_statuses, columns), *texts)


def print_status(statuses: "Sequence[RunStatus]", run: Path, console: "Console") -> None:
    """Print all there is, once."""
    columns = _choose_columns(statuses)
    print_whole(_make_table(statuses, columns), console)
    for note in [*_write_notes(statuses, run), _join_legend(columns)]:
        console.print(note, style="dim")


def print_changes(statuses: "Sequence[RunStatus]", before: "Sequence[RunStatus]", console: "Console") -> None:
    """Print a plain line for every run that has changed."""
    last_seen = {(status.method, status.seed, status.split): (status.state, status.round) for status in before}
    has_seeds = len({status.seed for status in statuses}) > 1
    has_splits = len({status.split for status in statuses}) > 1
    for status in statuses:
        is_known = last_seen.get((status.method, status.seed, status.split)) == (status.state, status.round)
        if not is_known and (status.state != "waiting" or not before):
            which = [f"seed {status.seed}"] * has_seeds + [f"split {status.split}"] * has_splits
            run = f" ({', '.join(which)})" if which else ""
            failure = f"; {status.failure}" if status.failure else ""
            console.print(f"{status.method}{run}: {_describe_status(status)}{failure}")


def _describe_status(status: "RunStatus") -> str:
    """Describe a run in plain words: `running, round 3 of 9, mean 81.20%, ...`."""
    has_round, seconds_left = bool(status.round), status.seconds_left or 0.0
    metric = METRICS[status.metric]
    mean, gain, worst = (value or 0.0 for value in (status.mean, status.gain, status.worst10))
    name = "" if metric.is_percent else f"{metric.label} "
    parts = {
        status.state: True,
        f"round {status.round} of {status.rounds}": has_round,
        f"mean {name}{metric.format(mean)}": status.mean is not None,
        f"{metric.format_gap(gain, signed=True)} to local": status.gain is not None,
        f"worst 10% {metric.format(worst)}": status.worst10 is not None,
        format_bytes(status.bytes): has_round,
        f"{_format_duration(status.seconds)} so far": has_round,
        f"about {_format_duration(seconds_left)} left": seconds_left >= 1,
        f"{status.absent:,} absent": status.absent,
        f"{status.diverged:,} diverged": status.diverged,
    }
    return ", ".join(part for part, is_said in parts.items() if is_said)
