"""Print for a terminal and for a pipe: tables are never cut, and a pipe gets plain lines of any length."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .compare import MeanStd, MethodRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def format_bytes(count: float) -> str:
    """Bytes as people read them: 146.4 kB."""
    from rich.filesize import decimal

    return decimal(round(count)).replace(" bytes", " B").replace(" byte", " B")


def make_console() -> "Console":
    """A console on standard output that neither wraps nor colours text in a pipe."""
    import sys

    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def make_table(*columns: str, left: tuple[str, ...]) -> "Table":
    """An empty table; columns not named in `left` hold numbers and stand to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    return table


def measure_width(table: "Table", console: "Console") -> int:
    """Characters that the table needs when nothing is cut."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


def print_whole(table: "Table", console: "Console") -> None:
    """Print a table at its own width, even where that is more than the terminal's."""
    before = console.width
    try:
        console.width = max(measure_width(table, console), 1)
        with console.capture() as captured:
            console.print(table, crop=False)
    finally:
        console.width = before
    for line in captured.get().splitlines():
        print(line if console.is_terminal else line.rstrip(), file=console.file)


def print_indented(text: "Text", by: int, console: "Console") -> None:
    """Print a paragraph moved to the right, all its lines on a terminal."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, by)))
    else:
        console.print(Text(" " * by) + text)


# --- the table -----------------------------------------------------------------------------------------

RowFormatter = Callable[[MethodRow], str]


def _format_mean_std(spread: MeanStd | None, n_seeds: int) -> str:
    if spread is None:
        return "-"
    return f"{100 * spread.mean:.2f}" + (f" ±{100 * spread.std:.1f}" if n_seeds > 1 else "")


def _format_rounds(row: MethodRow) -> str:
    """The mean round in which the accuracy was reached, and of how many seeds where not all reached it."""
    reached = [round_ for round_ in row.rounds_to or () if round_ is not None]
    if not reached:
        return "never"
    mean = f"{np.mean(reached):.0f}" if len(set(reached)) == 1 else f"{np.mean(reached):.1f}"
    if len(reached) < row.n_seeds:
        return f"{mean} in {len(reached)} of {row.n_seeds}"
    return mean + (f" ±{np.std(reached):.1f}" if row.n_seeds > 1 else "")


QUALITY_COLUMNS: dict[str, RowFormatter] = {
    "model": lambda row: row.point,
    "mean %": lambda row: _format_mean_std(row.mean, row.n_seeds),
    "pooled %": lambda row: _format_mean_std(row.pooled, row.n_seeds),
    "std": lambda row: _format_mean_std(row.std, row.n_seeds),
    "worst 10%": lambda row: _format_mean_std(row.worst10, row.n_seeds),
    "> local": lambda row: "-" if row.better_than_local is None else f"{100 * row.better_than_local:.0f}%",
}


EXTRA_COLUMNS: dict[str, RowFormatter] = {
    "global %": lambda row: _format_mean_std(row.generalised, row.n_seeds),
    "arrived %": lambda row: _format_mean_std(row.arrived, row.n_seeds),
    "new %": lambda row: _format_mean_std(row.newcomers, row.n_seeds),
}


ROUND_COLUMNS: dict[str, RowFormatter] = {
    "last 10%": lambda row: _format_mean_std(row.mean_last_10pct, row.n_seeds),
    "best val.": lambda row: _format_mean_std(row.best_validation, row.n_seeds),
    "BMTA*": lambda row: _format_mean_std(row.bmta, row.n_seeds),
    "pooled BMTA*": lambda row: _format_mean_std(row.bmta_pooled, row.n_seeds),
}


COST_COLUMNS: dict[str, RowFormatter] = {
    "up": lambda row: format_bytes(row.bytes_up),
    "down": lambda row: format_bytes(row.bytes_down),
    "seconds": lambda row: f"{row.seconds:.1f}",
    "steps": lambda row: f"{row.local_steps:,.0f}",
}


METHODS_LEGEND = (
    "mean, pooled, std, worst 10%: test accuracy over clients, over all samples, its spread and its mean "
    "over the worst tenth of clients, last round; > local: clients better than alone; last 10%: mean over the "
    "last tenth of the rounds; best val.: mean at the round with the best validation; BMTA*: best mean test "
    "accuracy of any round, optimistic, for the test data choose the round; steps: local mini-batch steps per "
    "client"
)


EXTRA_LEGEND = {
    "global %": "the one global model on all clients' test samples together",
    "arrived %": "mean over clients that joined after training, with the model that they were sent at first",
    "new %": "the same after rounds of their own",
}


def choose_columns(
    lines: Sequence[MethodRow], rounds_to: float | None = None
) -> list[dict[str, RowFormatter]]:
    """The columns in groups that belong together; those that no method has a number for are left out."""
    has = {
        "global %": any(row.generalised is not None for row in lines),
        "arrived %": any(row.arrived is not None for row in lines),
        "new %": any(row.newcomers is not None for row in lines),
    }
    beyond = {title: cell for title, cell in EXTRA_COLUMNS.items() if has[title]}
    asked = {} if rounds_to is None else {f"rounds to {100 * rounds_to:g}%": _format_rounds}
    return [QUALITY_COLUMNS, beyond | ROUND_COLUMNS | asked, COST_COLUMNS]


def write_legend(lines: Sequence[MethodRow], rounds_to: float | None = None) -> str:
    """What the columns mean."""
    said = [METHODS_LEGEND]
    titles = [title for group in choose_columns(lines, rounds_to) for title in group]
    said += [f"{title.removesuffix(' %')}: {text}" for title, text in EXTRA_LEGEND.items() if title in titles]
    if rounds_to is not None:
        said.append(
            f"rounds to {100 * rounds_to:g}%: the first evaluated round with that mean or more, of the seeds that "
            "reach it"
        )
    return "; ".join(said)


def _make_methods_table(lines: Sequence[MethodRow], columns: dict[str, RowFormatter]) -> "Table":
    table = make_table("method", *columns, left=("method", "model"))
    best = max(row.mean.mean for row in lines)
    for row in lines:
        style = "bold" if row.mean.mean == best and len(lines) > 1 else None
        table.add_row(row.algorithm, *(cell(row) for cell in columns.values()), style=style)
    return table


def _split_columns(
    lines: Sequence[MethodRow], groups: Sequence[dict[str, RowFormatter]], console: "Console"
) -> list[dict[str, RowFormatter]]:
    """The columns in few tables that fit the width; a group stays whole where it can."""

    def fits(wanted: dict[str, RowFormatter]) -> bool:
        return (
            not console.is_terminal
            or measure_width(_make_methods_table(lines, wanted), console) <= console.width
        )

    parts: list[dict[str, RowFormatter]] = [{}]
    for group in groups:
        if not fits(parts[-1] | group) and fits(group):
            parts.append({})
        for title, cell in group.items():
            if parts[-1] and not fits(parts[-1] | {title: cell}):
                parts.append({})
            parts[-1][title] = cell
    return parts


def print_methods(lines: Sequence[MethodRow], console: "Console", rounds_to: float | None = None) -> None:
    """Print the rows without ever cutting a number: in several parts where one does not fit the width."""
    for part in _split_columns(lines, choose_columns(lines, rounds_to), console):
        print_whole(_make_methods_table(lines, part), console)
    console.print(write_legend(lines, rounds_to), style="dim")
